//! The nodes that each node follows: the actions of a host, as SIMULATOR.md, "The actions of a step", has them, without their times.

use std::io::{self, Write};

use super::after::After;
use super::nodes::Nodes;
use super::prepared::Prepared;
use crate::Time;
use crate::host::{Action, Block, Placement, Reference};

/// The state of a rank between two actions.
pub(super) struct Walk {
    placement: Placement,
    /// The nodes that the next action of the thread follows.
    host: After,
    /// Those that the next computation follows.
    computation: After,
    /// The last operation of each stream.
    streams: After,
    /// The reduce-scatters of the microbatch before, in the plan's order.
    earlier: Vec<After>,
}

/// A block that is walked through.
struct Step<'a, 's, W> {
    walk: &'a mut Walk,
    block: &'a Block,
    prepared: &'a mut Prepared,
    nodes: &'a mut Nodes<'s, W>,
    /// By index: the operations that were issued.
    issued: Vec<Option<After>>,
    /// How many of [`Block::all_reduces`] were.
    all_reduces: usize,
}

impl Walk {
    pub(super) fn new(placement: Placement) -> Self {
        let [host, computation, streams] = [After::default(); 3];
        Self { placement, host, computation, streams, earlier: Vec::new() }
    }

    /// Adds the nodes of a block, once.
    pub(super) fn block<W: Write>(
        &mut self,
        block: &Block,
        prepared: &mut Prepared,
        nodes: &mut Nodes<'_, W>,
    ) -> io::Result<()> {
        let issued = vec![None; block.operations.len()];
        let mut step = Step { walk: self, block, prepared, nodes, issued, all_reduces: 0 };
        for (place, action) in block.actions.iter().enumerate() {
            step.act(place, *action)?;
        }
        let scatters = block.scatters.iter().map(|index| step.after(Reference::Here(*index)));
        let scatters: Vec<After> = scatters.collect();
        // The exchange in which ranks say that they have no other microbatch is a block, too.
        if !scatters.is_empty() {
            self.earlier = scatters;
        }
        Ok(())
    }

    fn is_on_host(&self) -> bool {
        self.placement == Placement::Host
    }
}

impl<W: Write> Step<'_, '_, W> {
    fn act(&mut self, place: usize, action: Action) -> io::Result<()> {
        match action {
            Action::Issue(index) => self.issue(index, After::default())?,
            Action::IssueReady => self.issue_ready()?,
            Action::Need(reference) => self.need(reference),
            Action::Settle(reference) if self.walk.is_on_host() => self.need(reference),
            Action::Settle(_) => {}
            Action::Read => self.walk.host = self.walk.host.and(self.walk.computation),
            Action::Compute(_) => self.compute(place)?,
        }
        Ok(())
    }

    /// Issues an operation, unless it was. It begins behind the one before on its stream, and behind the computation so far.
    fn issue(&mut self, index: usize, behind: After) -> io::Result<()> {
        if self.issued[index].is_some() {
            return Ok(());
        }
        let (walk, operation) = (&mut *self.walk, &mut self.prepared.operations[index]);
        if operation.call.time > Time::ZERO {
            walk.host = self.nodes.add(&mut operation.call, walk.host)?;
            if walk.is_on_host() {
                walk.computation = walk.host;
            }
        }
        let stream = walk.streams.only(operation.lane);
        let mut after = walk.host.and(walk.computation).and(behind).and(stream);
        if let Some(collective) = &mut operation.collective {
            after = self.nodes.add(collective, after)?;
            walk.streams = walk.streams.and(after);
        }
        self.issued[index] = Some(after);
        Ok(())
    }

    /// The runtime issues the all-reduces whose reduce-scatters are complete, which a graph cannot say. Here, as on devices, each is issued when
    /// the next reduce-scatter was, and begins when its own is complete.
    fn issue_ready(&mut self) -> io::Result<()> {
        while let Some([(scatter, index), (next, _)]) =
            self.block.all_reduces.get(self.all_reduces..self.all_reduces + 2)
        {
            if !self.is_issued(*next) {
                break;
            }
            self.issue(*index, self.after(*scatter))?;
            self.all_reduces += 1;
        }
        Ok(())
    }

    fn is_issued(&self, reference: Reference) -> bool {
        match reference {
            Reference::Here(index) => self.issued[index].is_some(),
            Reference::Earlier(_) => true,
        }
    }

    /// The nodes that a follower of an operation follows. There is no microbatch before the first.
    fn after(&self, reference: Reference) -> After {
        let after = match reference {
            Reference::Here(index) => self.issued[index],
            Reference::Earlier(place) => self.walk.earlier.get(place).copied(),
        };
        after.unwrap_or_default()
    }

    fn need(&mut self, reference: Reference) {
        let after = self.after(reference);
        let is_exchange = match reference {
            Reference::Here(index) => self.prepared.operations[index].is_exchange,
            Reference::Earlier(_) => false,
        };
        let walk = &mut *self.walk;
        walk.computation = walk.computation.and(after);
        if walk.is_on_host() || is_exchange {
            walk.host = walk.host.and(after);
        }
    }

    /// The device begins when the thread launches. All that follows it follows the thread, too, so nothing follows it before the launch ends.
    fn compute(&mut self, place: usize) -> io::Result<()> {
        let Some(work) = &mut self.prepared.works[place] else { return Ok(()) };
        let (launched, walk) = (self.walk.host, &mut *self.walk);
        if work.device.is_none() || work.host.time > Time::ZERO {
            walk.host = self.nodes.add(&mut work.host, walk.host)?;
        }
        walk.computation = match &mut work.device {
            None => walk.host,
            Some(device) => self.nodes.add(device, walk.computation.and(launched))?,
        };
        Ok(())
    }
}
