//! Steps that ranks give up while NCCL carries their operations between processes: each process
//! runs [`as_process`].

use std::env;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hsdp::WorldOptions;
use hsdp::mpi::Job;
use hsdp_comm::{
    Channel, Contribution, DeviceAccumulator, Group, Scaling, Stage, StepFailure, Tag, World,
};
use hsdp_kernels::cuda::{Device, DeviceBuffer, Noted, Stream};
use hsdp_kernels::{Fold, GradientValues, Values, Wire};
use hsdp_sharding::{DType, Param, Rank, Unit, UnitLayout};
use hsdp_train::tell;

use crate::Named;
use crate::faults::folder;
use crate::job::{Ended, has, mpirun, pause, run};
use crate::{differing, one_order, step_machine};

pub(crate) const TRIALS: &[Named] = &[
    ("devices::the_bits_after_a_step_that_is_given_up_are_those_without", || passes("given up")),
    ("devices::an_error_of_one_rank_alone_ends_its_step_and_not_the_world", || {
        passes("fails alone")
    }),
    ("devices::a_rank_waits_before_too_many_calls_are_not_done", || passes("many calls")),
    ("devices::a_rank_that_is_missing_is_waited_for_until_the_deadline", missing),
    ("devices::a_rank_that_leaves_a_step_that_is_given_up_ends_the_next", || leaves("leaves")),
    ("devices::so_does_one_that_leaves_the_first_call_of_a_communicator", || {
        leaves("leaves first")
    }),
    ("devices::words_after_a_step_that_is_given_up_are_those_of_drained_ranks", || passes("words")),
    ("devices::groups_are_connected_right_after_a_step_that_is_given_up", || passes("connects")),
];

/// Set in the environment of processes that run [`as_process`], and not the tests.
pub(crate) const PROCESS: &str = "HSDP_TESTS_GIVEN_UP";

/// Longer than anything takes here.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The deadline of a world in which a rank is missing.
const SHORT: Duration = Duration::from_secs(2);

/// A step has so many operations.
const OPERATIONS: usize = 10;

fn process(scenario: &str, meeting: &Path) -> Result<Ended, String> {
    let mut command = mpirun();
    let program = env::current_exe().map_err(|error| error.to_string())?;
    command.args(["-n", "4"]).arg(program).env(PROCESS, scenario);
    command.env("HSDP_EMULATED_NCCL_FOLDER", meeting);
    command.env("HSDP_EMULATED_MEMORY", (64 << 20).to_string());
    run(command)
}

/// All four processes end well.
pub(crate) fn passes(scenario: &str) -> Result<(), String> {
    let ended = process(scenario, folder()?.path())?;
    match ended.code {
        Some(0) => Ok(()),
        code => Err(format!("exit code {code:?}: {}", ended.err)),
    }
}

/// These ranks say that they have what they expect. MPI does not like that the world ends early:
/// the exit code does not count.
pub(crate) fn say(scenario: &str, ranks: Range<usize>) -> Result<Ended, String> {
    let ended = process(scenario, folder()?.path())?;
    let said: Vec<_> = ranks.map(|rank| format!("rank {rank}: it is as expected")).collect();
    has(&ended.err, &said.iter().map(String::as_str).collect::<Vec<_>>())?;
    Ok(ended)
}

/// Says so, and stays until the others have said it, whose worlds may take two seconds to end: MPI
/// ends them with this process.
pub(crate) fn is_as_expected(rank: Rank) {
    tell(&format!("rank {rank}"), "it is as expected");
    pause(Duration::from_secs(3));
}

fn leaves(scenario: &str) -> Result<(), String> {
    let ended = say(scenario, 0..3)?;
    match ended.err.contains("is not told in time") {
        true => Err(ended.err),
        false => Ok(()),
    }
}

fn missing() -> Result<(), String> {
    let started = Instant::now();
    let meeting = folder()?;
    let ended = process("missing", meeting.path())?;
    has(&ended.err, &["deadline of 2s missed"])?;
    let took = ended.at - started;
    if took < Duration::from_secs(30) { Ok(()) } else { Err(format!("it took {took:?}")) }
}

/// One of four processes, each with a device.
pub(crate) fn as_process(scenario: &str) -> Result<(), String> {
    let job = Job::join(PATIENCE).map_err(|error| error.to_string())?;
    match scenario {
        "absent" | "late" | "late-zeros" => return one_order::as_process(scenario, &job),
        "machine" | "machine-drawn" => return step_machine::as_process(scenario, &job),
        "differ" | "faults" => return differing::as_process(scenario, &job),
        _ => {}
    }
    let deadline = if scenario == "missing" { SHORT } else { PATIENCE };
    let options = WorldOptions { deadline, ..WorldOptions::default() };
    let world = job.world(4, options).map_err(|error| error.to_string())?.ok_or("no rank")?;
    let told = format!("rank {}", world.rank());
    let rank = Process::connected(world).map_err(|error| format!("{told}: {error}"))?;
    let ended = match scenario {
        "given up" => rank.gives_up_at_each_point(),
        "fails alone" => rank.fails_alone(),
        "many calls" => rank.issues_many_calls(),
        "leaves" => rank.leaves(OPERATIONS),
        "leaves first" => rank.leaves(0),
        "words" => rank.takes_words(),
        "connects" => rank.connects_groups(),
        _ => rank.misses_a_rank(),
    };
    ended.map_err(|error| format!("{told}: {error}"))
}

/// A rank of 2 x 2.
pub(crate) struct Process {
    pub(crate) world: World,
    stream: Stream,
    pub(crate) groups: [Group; 3],
    layout: Arc<UnitLayout>,
}

/// When a rank reads what its operations wrote.
#[derive(Clone, Copy, PartialEq)]
enum Reads {
    /// The host waits for each operation before it issues the next.
    Each,
    AtTheEnd,
}

pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

impl Process {
    pub(crate) fn connected(world: World) -> Outcome<Self> {
        let device = Device::new(0)?;
        world.connect_nccl(&device)?;
        let rank = world.rank().index();
        let row = [rank / 2 * 2, rank / 2 * 2 + 1].map(Rank::new);
        let column = [rank % 2, rank % 2 + 2].map(Rank::new);
        let groups = [
            world.group(&row, Channel::Gather)?,
            world.group(&row, Channel::Reduce)?,
            world.group(&column, Channel::AllReduce)?,
        ];
        world.connect_groups(&groups.each_ref())?;
        let unit = Unit::new("unit")
            .param(Param::new("weight", [37, 19]))
            .param(Param::new("table", [211]).frozen());
        let layout = Arc::new(UnitLayout::new(&unit, 2)?);
        Ok(Self { world, stream: device.stream()?, groups, layout })
    }

    fn on_device(&self, values: &[f32]) -> Outcome<DeviceBuffer> {
        let device = self.stream.device();
        let len = values.len();
        let mut buffer = DeviceBuffer::new(device, DType::F32, len, "a test")?;
        buffer.write(&self.stream, Values::F32(values))?;
        Ok(buffer)
    }

    pub(crate) fn read(&self, buffer: &DeviceBuffer) -> Outcome<Vec<u32>> {
        let read = buffer.read_back(&self.stream, PATIENCE)?;
        Ok(read.values().to_f32().into_iter().map(f32::to_bits).collect())
    }

    fn values(&self, len: usize, operation: usize) -> Vec<f32> {
        let rank = self.world.rank().index();
        (0..len).map(|at| ((rank * 3 + at * 7 + operation) % 8) as f32).collect()
    }

    /// One operation of a step, by its number.
    fn operation(&self, number: usize) -> Outcome<DeviceBuffer> {
        match number % 5 {
            0 => self.gather(&self.groups[0], number),
            1 => self.reduced(&self.layout, |len| Arc::new(self.values(len, number)), || ()),
            2 => self.sum_of(&self.groups[2], &self.values(1057, number), Wire::F32),
            3 => self.sum_of_parts(&self.values(1057, number)),
            _ => self.gather_of_parts(&self.values(1060, number)),
        }
    }

    /// Sums uneven parts over a column, each in place on its owner.
    fn sum_of_parts(&self, values: &[f32]) -> Outcome<DeviceBuffer> {
        let mine = self.on_device(values)?;
        let cuts = [0, 505, values.len()].into();
        let scaling = Scaling::on(Wire::F32);
        let sum = self.groups[2].reduce_scatter_scaled_on_device(tag(), cuts, mine, scaling)?;
        Ok(sum.wait()?)
    }

    /// Gathers uneven parts over a column in place. Checks the own part of a buffer that comes
    /// back.
    fn gather_of_parts(&self, values: &[f32]) -> Outcome<DeviceBuffer> {
        let group = &self.groups[2];
        let cuts: Arc<[usize]> = [0, 505, values.len() - 3].into();
        let own = cuts[group.index()]..cuts[group.index() + 1];
        let pending = group.gather_parts_on_device(tag(), cuts, self.on_device(values)?);
        let failed = match pending.and_then(|pending| pending.wait()) {
            Ok(gathered) => return Ok(gathered),
            Err(failed) => failed,
        };
        let error = failed.error.clone();
        let buffer = failed.reclaim().map_err(|failed| failed.error)?;
        let found = self.read(&buffer)?;
        let is_own =
            found[own.clone()].iter().copied().eq(values[own].iter().map(|it| it.to_bits()));
        Err(if is_own { error.into() } else { format!("another part after: {error}").into() })
    }

    pub(crate) fn gather(&self, group: &Group, number: usize) -> Outcome<DeviceBuffer> {
        let layout = Arc::clone(&self.layout);
        let shard = Arc::new(self.on_device(&self.values(layout.shard_len(), number))?);
        let device = self.stream.device();
        let len = layout.full_len();
        let full = DeviceBuffer::new(device, DType::F32, len, "a test")?;
        Ok(group.gather_unit_on_device(tag(), layout, shard, full)?.wait()?)
    }

    pub(crate) fn sum(&self, group: &Group, len: usize, wire: Wire) -> Outcome<DeviceBuffer> {
        self.sum_of(group, &vec![1.0; len], wire)
    }

    fn sum_of(&self, group: &Group, values: &[f32], wire: Wire) -> Outcome<DeviceBuffer> {
        let mine = self.on_device(values)?;
        Ok(group.all_reduce_scaled_on_device(tag(), mine, Scaling::on(wire))?.wait()?)
    }

    /// One step, by which the communicators are connected.
    pub(crate) fn connects(&self) -> Outcome<()> {
        self.step(OPERATIONS, Reads::AtTheEnd).map(drop)
    }

    fn accumulator(&self, layout: &UnitLayout) -> Outcome<DeviceAccumulator> {
        let partial = self.on_device(&vec![0.0; layout.trainable().shard_len])?;
        Ok(DeviceAccumulator { partial, fold: Fold::Add, noted: Noted::new(&self.stream)? })
    }

    /// A reduction of gradients; something is done before it is issued.
    fn reduced(
        &self,
        layout: &Arc<UnitLayout>,
        gradient: impl Fn(usize) -> Arc<dyn GradientValues>,
        before: impl FnOnce(),
    ) -> Outcome<DeviceBuffer> {
        let is_trained =
            |slot: &&hsdp_sharding::ParamSlot| slot.role == hsdp_sharding::Role::Trainable;
        let gradients = layout.params().iter().map(|slot| Some(slot).filter(is_trained));
        let gradients = gradients.map(|slot| slot.map(|slot| gradient(slot.len))).collect();
        let accumulator = self.accumulator(layout)?;
        before();
        let contribution = Contribution { gradients, scaling: Scaling::on(Wire::F32) };
        let layout = Arc::clone(layout);
        let pending =
            self.groups[1].reduce_unit_on_device(tag(), layout, contribution, accumulator)?;
        Ok(pending.wait()?.partial)
    }

    /// The operations of a step up to `end`: what they wrote.
    fn step(&self, end: usize, reads: Reads) -> Outcome<Vec<Vec<u32>>> {
        let mut buffers = Vec::new();
        let mut read = Vec::new();
        for number in 0..end {
            let buffer = self.operation(number)?;
            if reads == Reads::Each {
                read.push(self.read(&buffer)?);
            }
            buffers.push(buffer);
        }
        if reads == Reads::Each || end < OPERATIONS {
            return Ok(read);
        }
        buffers.iter().map(|buffer| self.read(buffer)).collect()
    }

    fn give_up(&self) {
        self.world.abort_step(StepFailure { step: 2, reason: "a test".to_owned() });
    }

    /// Waits until another rank has given up the step.
    fn until_given_up(&self, epoch: u64) {
        while self.world.next_epoch() == epoch && self.world.end().is_none() {
            std::thread::yield_now();
        }
    }

    /// One rank gives up its step after so many operations.
    fn gives_up(&self, point: usize, reads: Reads) -> Outcome<()> {
        let epoch = self.world.epoch();
        if self.world.rank().index() == point % 4 {
            self.step(point, Reads::AtTheEnd)?;
            self.give_up();
        } else if let Err(error) = self.step(OPERATIONS, reads)
            && !error.to_string().contains("a test")
        {
            return Err(format!("given up at {point}: {error}").into());
        }
        self.until_given_up(epoch);
        Ok(())
    }

    fn gives_up_at_each_point(&self) -> Outcome<()> {
        let before = self.world.messages().data;
        // Communicators are not connected before their first operation.
        self.gives_up(1, Reads::Each)?;
        let expected = self.step(OPERATIONS, Reads::AtTheEnd)?;
        for (point, reads) in
            (0..=OPERATIONS).flat_map(|at| [(at, Reads::Each), (at, Reads::AtTheEnd)])
        {
            self.gives_up(point, reads)?;
            for _ in 0..2 {
                if self.step(OPERATIONS, Reads::AtTheEnd)? != expected {
                    return Err(
                        format!("other bits after a step that was given up at {point}").into()
                    );
                }
            }
        }
        // The operations of the groups on the control channel are exchanges.
        match self.world.messages().data - before {
            0 => Ok(()),
            sent => Err(format!("{sent} data messages").into()),
        }
    }

    /// Rank 1 has no memory for its gradients, then a gradient that panics.
    fn fails_alone(&self) -> Outcome<()> {
        let expected = self.step(OPERATIONS, Reads::AtTheEnd)?;
        for failure in [Self::has_no_memory, Self::panics] {
            let epoch = self.world.epoch();
            if self.world.rank().index() == 1 {
                self.step(4, Reads::AtTheEnd)?;
                failure(self)?;
                self.give_up();
            } else {
                let _given_up = self.step(OPERATIONS, Reads::Each);
            }
            self.until_given_up(epoch);
            if self.step(OPERATIONS, Reads::AtTheEnd)? != expected {
                return Err("other bits after an error".into());
            }
        }
        Ok(())
    }

    fn has_no_memory(&self) -> Outcome<()> {
        let wide = Unit::new("wide").param(Param::new("wide", [1 << 20]));
        let layout = Arc::new(UnitLayout::new(&wide, 2)?);
        let device = self.stream.device();
        let mut taken = Vec::new();
        let take_all = || {
            while let Ok(buffer) = DeviceBuffer::new(device, DType::F32, 1 << 18, "a test") {
                taken.push(buffer);
            }
        };
        match self.reduced(&layout, |len| Arc::new(vec![1.0_f32; len]), take_all) {
            Err(error) if error.to_string().contains("out of memory") => Ok(()),
            Err(error) => Err(format!("another error: {error}").into()),
            Ok(_) => Err("there was memory".into()),
        }
    }

    fn panics(&self) -> Outcome<()> {
        let reduced = || self.reduced(&self.layout, |len| Arc::new(Panics(len)), || ());
        match catch_unwind(AssertUnwindSafe(reduced)) {
            Ok(_) => Err("it did not panic".into()),
            Err(_) => Ok(()),
        }
    }

    /// In each column, the first rank is ahead of the second.
    fn issues_many_calls(&self) -> Outcome<()> {
        self.step(OPERATIONS, Reads::AtTheEnd)?;
        let is_first = self.world.rank().index() < 2;
        let call = || self.sum(&self.groups[2], 8, Wire::F32);
        let mut outputs = Vec::new();
        if is_first {
            for _ in 0..64 {
                outputs.push(call()?);
            }
        }
        // Nobody has waited so far.
        self.world.world_group(Channel::User).barrier(Tag::default())?.wait()?;
        let began = Instant::now();
        if !is_first {
            pause(Duration::from_secs(1));
            for _ in 0..64 {
                outputs.push(call()?);
            }
        }
        outputs.push(call()?);
        let waited = began.elapsed();
        let last = self.read(&outputs[64])?;
        match last == [2.0_f32.to_bits(); 8] && (!is_first || waited > Duration::from_millis(300)) {
            true => Ok(()),
            false => Err(format!("{last:?} after {waited:?}").into()),
        }
    }

    /// Rank 3 gives up its step after so many operations, and leaves: ranks that need it are told
    /// so.
    fn leaves(self, operations: usize) -> Outcome<()> {
        let began = Instant::now();
        self.step(operations, Reads::AtTheEnd)?;
        if self.world.rank().index() == 3 {
            // The others are in the midst of a call.
            pause(Duration::from_millis(20));
            self.give_up();
            drop(self);
            // MPI ends the others with this process.
            pause(Duration::from_secs(5));
            return Ok(());
        }
        let _given_up = self.step(OPERATIONS, Reads::Each);
        self.until_given_up(0);
        let next = self.step(OPERATIONS, Reads::Each);
        let took = began.elapsed();
        match next {
            Err(error)
                if error.to_string().starts_with("world aborted: rank 3")
                    && took < PATIENCE / 3 =>
            {
                is_as_expected(self.world.rank());
                Ok(())
            }
            other => Err(format!("it is not told in time, but {other:?} after {took:?}").into()),
        }
    }

    /// The words of ranks agree, though they are taken before any watchdog looks.
    fn takes_words(&self) -> Outcome<()> {
        self.step(OPERATIONS, Reads::AtTheEnd)?;
        for point in 0..OPERATIONS {
            self.gives_up(point, Reads::AtTheEnd)?;
            // A call of no elements is counted, too.
            if !self.read(&self.sum(&self.groups[2], 0, Wire::F32)?)?.is_empty() {
                return Err("elements of a sum of none".into());
            }
            let word = self.world.operations_word(&self.groups.each_ref());
            let all = self.world.world_group(Channel::User).all_gather(tag(), word.to_vec())?;
            let words = all.wait()?;
            let words = words.as_chunks().0.iter();
            let words = words.map(|[low, high]| u128::from(*low) | u128::from(*high) << 64);
            if words.fold(0, u128::wrapping_add) != 0 {
                return Err(
                    format!("words differ after a step that was given up at {point}").into()
                );
            }
        }
        Ok(())
    }

    /// Two ranks connect a group at once, for which the others are late: they wait for their calls
    /// to be drained.
    fn connects_groups(&self) -> Outcome<()> {
        let began = Instant::now();
        self.step(OPERATIONS, Reads::AtTheEnd)?;
        for channel in [Channel::Gather, Channel::Reduce, Channel::AllReduce] {
            self.gives_up(4, Reads::AtTheEnd)?;
            if self.world.rank().index().is_multiple_of(2) {
                self.operation(2)?;
            }
            self.world.connect_groups(&[&self.world.world_group(channel)])?;
        }
        match began.elapsed() {
            took if took < PATIENCE / 3 => Ok(()),
            took => Err(format!("groups are connected after {took:?}").into()),
        }
    }

    fn misses_a_rank(&self) -> Outcome<()> {
        self.step(OPERATIONS, Reads::AtTheEnd)?;
        if self.world.rank().index() == 3 {
            while self.world.end().is_none() {
                std::thread::yield_now();
            }
            return Ok(());
        }
        let missed = self.step(OPERATIONS, Reads::Each);
        // The host has waited for a copy; why it returned is said by the next call.
        let missed = missed.and_then(|_| self.step(1, Reads::Each));
        Err(missed.err().unwrap_or_else(|| "no rank was missing".into()))
    }
}

fn tag() -> Tag {
    Tag::new(Stage::Reduce).step(2)
}

/// A gradient that cannot be read.
#[derive(Debug)]
struct Panics(usize);

impl GradientValues for Panics {
    fn len(&self) -> usize {
        self.0
    }

    fn read(&self, _range: Range<usize>, _visit: &mut dyn FnMut(Values<'_>)) {
        panic!("a gradient panics on purpose")
    }
}
