//! The actions of a block, color by color.

use hsdp_flight::Channel;
use hsdp_sharding::Mesh;

use super::colors::Colors;
use super::meetings::{ColorStreams, Machinery, Meetings, Times};
use super::{Costs, Lane, Share, Shares, Span, What};
use crate::host::{Action, ModelPlacement, Reference, StepBlock, StepOperation, Work};
use crate::{Error, Time};

/// The place of a color in time.
#[derive(Clone, Debug, Default)]
pub(super) struct ColorState {
    /// Time of its thread.
    pub(super) host: Time,
    /// Time of its stream of computation, which is its thread where the model is in host memory.
    pub(super) computation: Time,
    /// The reduce-scatters of the microbatch before, in the plan's order.
    pub(super) earlier: Vec<(StepOperation, Times)>,
    /// The gathers of slices behind the update before, in the order of updates.
    pub(super) slices: Vec<(StepOperation, Times)>,
    pub(super) shares: Shares,
}

impl ColorState {
    pub(super) fn end(&self) -> Time {
        self.host.max(self.computation)
    }

    /// Computation waits for an operation. Returns the part of the wait that is due to late ranks:
    /// the time between the moments at which this rank and all ranks were ready.
    fn wait(&mut self, times: Times, share: Share) -> Time {
        let from = self.computation;
        let late = times.begins.saturating_sub(from.max(times.could));
        let all = times.ends.saturating_sub(from);
        self.shares.add(Share::Waiting, late);
        self.shares.add(share, all.saturating_sub(late));
        self.computation = self.computation.max(times.ends);
        late
    }

    /// Advances the thread by its work.
    fn work(&mut self, time: Time, share: Share) {
        self.host += time;
        self.computation = self.host;
        self.shares.add(share, time);
    }

    /// Computes on the device, from the launch on. Returns the time at which it begins.
    fn compute(&mut self, launched: Time, device: Time, share: Share) -> Time {
        let begins = self.computation.max(launched);
        let ends = (begins + device).max(self.host);
        self.shares.add(
            Share::Host,
            begins.saturating_sub(self.computation) + ends.saturating_sub(begins + device),
        );
        self.shares.add(share, device);
        self.computation = ends;
        begins
    }
}

/// The places of all colors in time.
#[derive(Clone, Debug)]
pub(super) struct ColorRanks {
    pub(super) of: Vec<ColorState>,
    pub(super) streams: ColorStreams,
}

impl ColorRanks {
    pub(super) fn new(colors: &Colors) -> Self {
        let of = vec![ColorState::default(); colors.len()];
        Self { of, streams: ColorStreams::new(colors.len()) }
    }
}

/// All ranks on their machines.
pub(super) struct SimulatedWorld<'a> {
    pub(super) mesh: Mesh,
    pub(super) placement: ModelPlacement,
    pub(super) costs: &'a dyn Costs,
    pub(super) colors: Colors,
    pub(super) ranks: ColorRanks,
    /// All that was done, if it is asked for.
    pub(super) spans: Option<Vec<Span>>,
}

#[cfg(test)]
thread_local! {
    /// Actions that this thread has simulated, of all colors.
    static DONE: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Returns the number of actions that this thread has simulated.
#[cfg(test)]
pub(crate) fn actions_done() -> u64 {
    DONE.with(std::cell::Cell::get)
}

/// The progress of a color in a block.
struct ColorProgress {
    actions: usize,
    /// Whether each operation was issued, by index.
    issued: Vec<bool>,
    /// How many of [`StepBlock::all_reduces`] were.
    all_reduces: usize,
    /// How many of these had their reduce-scatters issued when the thread last asked whether they
    /// are complete.
    asked: usize,
}

impl ColorProgress {
    fn in_block(block: &StepBlock) -> Self {
        Self { actions: 0, issued: vec![false; block.operations.len()], all_reduces: 0, asked: 0 }
    }

    /// Counts the all-reduces of a block, in its order, whose reduce-scatters are issued.
    fn scattered(&self, block: &StepBlock) -> usize {
        let is_issued = |(scatter, _): &&(Reference, usize)| match scatter {
            Reference::Here(scatter) => self.issued[*scatter],
            Reference::Earlier(_) | Reference::Slices(_) => true,
        };
        block.all_reduces.iter().take_while(is_issued).count()
    }
}

/// An action cannot be done before an operation has its times.
struct Parked;

impl SimulatedWorld<'_> {
    /// Runs a block on all colors, microbatch `number` of the step.
    ///
    /// All colors have the same actions. So the one that has done the fewest waits for operations
    /// that all have issued, and goes on.
    ///
    /// # Errors
    /// [`Error::Stuck`] if the block waits for an operation that it has not issued.
    pub(super) fn run(&mut self, block: &StepBlock, number: u64) -> Result<(), Error> {
        let Self { mesh, placement, ref colors, costs, .. } = *self;
        let world = Machinery { mesh, placement, colors, costs };
        let meetings = Meetings::new(&world, block);
        let ranks = &mut self.ranks;
        let spans = &mut self.spans;
        let mut run = BlockRun { world, block, meetings, ranks, spans, number };
        let mut progress: Vec<ColorProgress> =
            (0..colors.len()).map(|_| ColorProgress::in_block(block)).collect();
        let all = colors.len() * block.actions.len();
        #[cfg(test)]
        DONE.with(|done| done.set(done.get() + all as u64));
        let mut done = 0;
        while done < all {
            for (color, progress) in progress.iter_mut().enumerate() {
                run.advance(color, progress);
            }
            let now = progress.iter().map(|it| it.actions).sum();
            if now == done {
                return Err(Error::Stuck);
            }
            done = now;
        }
        run.end()
    }
}

/// The activity of a color from one time to another: the parts of a [`Span`] that differ from
/// action to action.
struct Doing {
    what: What,
    begins: Time,
    ends: Time,
    late: Time,
}

/// A run of a block.
struct BlockRun<'a> {
    world: Machinery<'a>,
    block: &'a StepBlock,
    meetings: Meetings<'a>,
    ranks: &'a mut ColorRanks,
    spans: &'a mut Option<Vec<Span>>,
    number: u64,
}

impl BlockRun<'_> {
    /// Does the actions of a color, up to one that is parked.
    fn advance(&mut self, color: usize, progress: &mut ColorProgress) {
        while let Some(action) = self.block.actions.get(progress.actions) {
            let done = match *action {
                Action::Issue(index) => {
                    self.issue(color, index, progress, Time::ZERO);
                    Ok(())
                }
                Action::IssueReady => self.issue_ready(color, progress),
                Action::Need(reference) => self.need(color, reference),
                Action::Settle(reference) => self.settle(color, reference),
                Action::Read => {
                    self.read(color);
                    Ok(())
                }
                Action::Compute(work) => {
                    self.compute(color, work);
                    Ok(())
                }
            };
            if done.is_err() {
                return;
            }
            progress.actions += 1;
        }
    }

    fn is_on_host(&self) -> bool {
        self.world.placement == ModelPlacement::Host
    }

    /// Issues an operation that does not begin before a time, unless it was issued.
    fn issue(&mut self, color: usize, index: usize, progress: &mut ColorProgress, after: Time) {
        if std::mem::replace(&mut progress.issued[index], true) {
            return;
        }
        let cost = self.meetings.cost(color, index);
        let operation = self.block.operations[index];
        let share = Share::of(operation.stage);
        let what = What::Issue(operation);
        let is_on_host = self.is_on_host();
        let rank = &mut self.ranks.of[color];
        let begins = rank.host;
        match is_on_host {
            true => rank.work(cost.host, share),
            false => rank.host += cost.host,
        }
        rank.shares.carry(cost.busy);
        let is_exchange = operation.channel == Channel::Control;
        let ready = if is_exchange { rank.host } else { rank.end() };
        let ends = rank.host;
        self.show(color, Lane::Host, Doing { what, begins, ends, late: Time::ZERO });
        self.meetings.issue(&mut self.ranks.streams, color, index, ready.max(after));
    }

    /// Issues the all-reduces that are next, as far as the thread has asked for their
    /// reduce-scatters before; each begins behind its own.
    ///
    /// A thread that finds a reduce-scatter incomplete comes back later. If the simulation decided
    /// so by times, a faster machine could take more time: the thread would come before the end of
    /// the reduce-scatter, and not behind it. So it decides by the number of calls.
    fn issue_ready(&mut self, color: usize, progress: &mut ColorProgress) -> Result<(), Parked> {
        let block = self.block;
        let scattered = progress.scattered(block);
        // The reduce-scatter of a group of one is complete when it is issued.
        let due = if self.world.mesh.shard_size() == 1 { scattered } else { progress.asked };
        while progress.all_reduces < due {
            let (scatter, index) = block.all_reduces[progress.all_reduces];
            let ends = self.find(color, scatter)?.map_or(Time::ZERO, |(_, times)| times.ends);
            self.issue(color, index, progress, ends);
            progress.all_reduces += 1;
        }
        progress.asked = scattered;
        Ok(())
    }

    /// Returns an operation and its times; `None` for one of a microbatch before the first.
    fn find(
        &self,
        color: usize,
        reference: Reference,
    ) -> Result<Option<(StepOperation, Times)>, Parked> {
        match reference {
            Reference::Here(index) => {
                let times = self.meetings.times(color, index).ok_or(Parked)?;
                Ok(Some((self.block.operations[index], times)))
            }
            Reference::Earlier(place) => Ok(self.ranks.of[color].earlier.get(place).copied()),
            Reference::Slices(place) => Ok(self.ranks.of[color].slices.get(place).copied()),
        }
    }

    fn need(&mut self, color: usize, reference: Reference) -> Result<(), Parked> {
        let Some((operation, times)) = self.find(color, reference)? else { return Ok(()) };
        let is_on_host = self.is_on_host();
        let what = What::Wait(operation);
        let rank = &mut self.ranks.of[color];
        let begins = rank.computation;
        let host = rank.host;
        let late = rank.wait(times, Share::of(operation.stage));
        let ends = rank.computation;
        if is_on_host || matches!(operation.channel, Channel::Control | Channel::Statistics) {
            rank.host = rank.host.max(times.ends);
        }
        let thread = rank.host;
        self.show(color, self.lane(), Doing { what, begins, ends, late });
        if !is_on_host {
            let late = Time::ZERO;
            self.show(color, Lane::Host, Doing { what, begins: host, ends: thread, late });
        }
        Ok(())
    }

    /// In host memory, the thread waits.
    fn settle(&mut self, color: usize, reference: Reference) -> Result<(), Parked> {
        if self.is_on_host() { self.need(color, reference) } else { Ok(()) }
    }

    /// Waits on the host until the device has computed.
    fn read(&mut self, color: usize) {
        let rank = &mut self.ranks.of[color];
        rank.host = rank.end();
    }

    fn compute(&mut self, color: usize, work: Work) {
        let cost = self.world.costs.work(work);
        let is_on_host = self.is_on_host();
        let rank = &mut self.ranks.of[color];
        let share = Share::of_work(work);
        let launched = rank.host;
        let late = Time::ZERO;
        let (begins, time) = match is_on_host {
            true => {
                rank.work(cost.host, share);
                (launched, cost.host)
            }
            false => {
                rank.host += cost.host;
                (rank.compute(launched, cost.device, share), cost.device)
            }
        };
        let host = rank.host;
        let ends = begins + time;
        self.show(color, self.lane(), Doing { what: What::Work(work), begins, ends, late });
        if !is_on_host {
            let what = What::Launch(work);
            self.show(color, Lane::Host, Doing { what, begins: launched, ends: host, late });
        }
    }

    /// Where a rank computes.
    fn lane(&self) -> Lane {
        if self.is_on_host() { Lane::Host } else { Lane::Computation }
    }

    /// Shows what a color does in the trace, if there is one.
    fn show(&mut self, color: usize, lane: Lane, doing: Doing) {
        let Doing { what, begins, ends, late } = doing;
        let microbatch = self.number;
        let span = Span { color, lane, what, microbatch, begins, ends, late };
        self.spans.iter_mut().filter(|_| span.is_shown()).for_each(|spans| spans.push(span));
    }

    /// Ends a block: the next one may refer to its reduce-scatters, and to its gathers of slices.
    fn end(self) -> Result<(), Error> {
        let Self { block, meetings, ranks, spans, number, .. } = self;
        for (color, rank) in ranks.of.iter_mut().enumerate() {
            let times = |index| meetings.times(color, index).ok_or(Error::Stuck);
            let of_block = |indices: &[usize]| {
                let timed = |index: &usize| Ok((block.operations[*index], times(*index)?));
                indices.iter().map(timed).collect::<Result<_, Error>>()
            };
            // The exchange in which ranks say that they have no other microbatch is a block, too.
            if !block.scatters.is_empty() {
                rank.earlier = of_block(&block.scatters)?;
            }
            if !block.slices.is_empty() {
                rank.slices = of_block(&block.slices)?;
            }
            let Some(spans) = spans else { continue };
            for (index, operation) in block.operations.iter().enumerate() {
                let Times { could, begins, ends } = times(index)?;
                let lane = Lane::Collectives(meetings.stream(index));
                let what = What::Operation(*operation);
                let microbatch = number;
                let late = begins.saturating_sub(could);
                spans.push(Span { color, lane, what, microbatch, begins, ends, late });
            }
        }
        Ok(())
    }
}
