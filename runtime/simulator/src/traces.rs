//! Traces of a simulated step, for other tools: a timeline, and the graph of its nodes for
//! simulators of networks. SIMULATOR.md, "Traces".

mod chakra;

use std::collections::BTreeSet;
use std::io::{self, Write};

use hsdp_flight::Stage;
use hsdp_sharding::{DType, ModelSpec, UnitId};
use serde::Serialize;

use crate::Time;
use crate::host::{Order, StepOperation, Work};
use crate::simulation::{Costs, Lane, RankTiming, Span, Timing, What};

/// The traces of a step.
#[derive(Clone, Copy)]
#[expect(missing_debug_implementations, reason = "costs need not be shown")]
pub struct Traces<'a> {
    /// The order of its ranks.
    pub order: &'a Order,
    /// The model whose units the order names.
    pub spec: &'a ModelSpec,
    /// The costs of its actions.
    pub costs: &'a dyn Costs,
}

/// Returns the name of computation: `forward layers.3`.
fn name_of_work(spec: &ModelSpec, work: Work) -> String {
    let of = |verb: &str, unit: UnitId| format!("{verb} {}", spec[unit].name);
    match work {
        Work::Forward(unit) => of("forward", unit),
        Work::Backward(unit) => of("backward", unit),
        Work::Accumulate(unit) => of("accumulate", unit),
        Work::Fold(unit) => of("fold", unit),
        Work::Loss => "loss".to_owned(),
        Work::Norm => "norm".to_owned(),
        Work::Update => "update".to_owned(),
        Work::UpdateSlice(unit) => of("update", unit),
    }
}

/// Returns the name of an operation: `reduce_scatter layers.3`, `all_gather header`. Operations on
/// slices are named by their stage: `scatter_sums layers.3`.
fn name_of_operation(spec: &ModelSpec, operation: &StepOperation) -> String {
    let StepOperation { op, stage, unit, .. } = operation;
    match (unit, stage) {
        (None, _) => format!("{op} {stage}"),
        (Some(unit), Stage::ScatterSums | Stage::GatherSlices) => {
            format!("{stage} {}", spec[*unit].name)
        }
        (Some(unit), _) => format!("{op} {}", spec[*unit].name),
    }
}

/// An event of the format; fields in its order of names.
#[derive(Serialize)]
struct TraceEvent<T> {
    ph: &'static str,
    pid: usize,
    tid: usize,
    name: T,
    #[serde(flatten)]
    slice: Option<TraceSlice>,
    args: Arguments,
}

/// The fields of a complete event. Times are in microseconds.
#[derive(Serialize)]
struct TraceSlice {
    cat: &'static str,
    ts: f64,
    dur: f64,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Arguments {
    Name { name: String },
    Place { sort_index: usize },
    Work { microbatch: u64 },
    Operation { microbatch: u64, bytes: u64, dtype: DType, members: usize, late_us: f64 },
}

impl Traces<'_> {
    /// Writes a step, as [`trace`](crate::trace) has it, as JSON of trace events: a process for
    /// each color of ranks, with a thread for the host, one for computation on a device, and one
    /// for each stream of collectives. Times are rounded to nanoseconds, the resolution of
    /// Perfetto, so that spans of a thread do not overlap there either.
    ///
    /// # Errors
    /// Errors of the sink, which is written in small pieces.
    pub fn write_timeline(
        &self,
        timing: &Timing,
        spans: &[Span],
        sink: &mut impl Write,
    ) -> io::Result<()> {
        write!(sink, "{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
        let mut before = "\n";
        let mut write = |event: TraceEvent<String>| {
            sink.write_all(before.as_bytes())?;
            before = ",\n";
            serde_json::to_writer(&mut *sink, &event).map_err(io::Error::from)
        };
        for (color, rank) in timing.ranks.iter().enumerate() {
            of_process(color, rank).into_iter().try_for_each(&mut write)?;
        }
        let threads: BTreeSet<_> = spans.iter().map(|span| (span.color, span.lane)).collect();
        for (color, lane) in threads {
            self.of_thread(color, lane).into_iter().try_for_each(&mut write)?;
        }
        spans.iter().map(|span| self.event(span)).try_for_each(write)?;
        writeln!(sink, "\n]}}")
    }

    fn of_thread(&self, color: usize, lane: Lane) -> [TraceEvent<String>; 2] {
        let name = lane.name(self.order.placement);
        of_place("thread", name.to_owned(), color, thread(lane))
    }

    fn event(&self, span: &Span) -> TraceEvent<String> {
        let (cat, name) = self.name(span.what);
        let begins = nanoseconds(span.begins);
        let ends = nanoseconds(span.ends);
        let slice = TraceSlice { cat, ts: micros(begins), dur: micros(ends - begins) };
        let args = match span.what {
            What::Work(_) | What::Launch(_) => Arguments::Work { microbatch: span.microbatch },
            What::Operation(it) | What::Issue(it) | What::Wait(it) => self.arguments(span, &it),
        };
        let pid = span.color + 1;
        let tid = thread(span.lane);
        TraceEvent { ph: "X", pid, tid, name, slice: Some(slice), args }
    }

    /// Returns its category, and its name.
    fn name(&self, what: What) -> (&'static str, String) {
        let work = |work| name_of_work(self.spec, work);
        let operation = |it| name_of_operation(self.spec, it);
        match what {
            What::Work(it) => ("computation", work(it)),
            What::Launch(it) => ("launch", format!("launch {}", work(it))),
            What::Operation(it) => ("collective", operation(&it)),
            What::Issue(it) => ("issue", format!("issue {}", operation(&it))),
            What::Wait(it) => ("wait", format!("wait for {}", operation(&it))),
        }
    }

    fn arguments(&self, span: &Span, operation: &StepOperation) -> Arguments {
        Arguments::Operation {
            microbatch: span.microbatch,
            bytes: operation.bytes(),
            dtype: operation.dtype,
            members: operation.members.count(self.order.mesh),
            late_us: micros(nanoseconds(span.late)),
        }
    }
}

fn of_process(color: usize, rank: &RankTiming) -> [TraceEvent<String>; 2] {
    let name = match rank.count {
        1 => format!("rank {}", rank.first),
        count => format!("rank {} and {} like it", rank.first, count - 1),
    };
    of_place("process", name, color, 0)
}

/// Returns the name and the place of a process or a thread.
fn of_place(kind: &str, name: String, color: usize, tid: usize) -> [TraceEvent<String>; 2] {
    let sort_index = if tid == 0 { color } else { tid };
    let event = |what: &str, args| {
        let name = format!("{kind}_{what}");
        TraceEvent { ph: "M", pid: color + 1, tid, name, slice: None, args }
    };
    [event("name", Arguments::Name { name }), event("sort_index", Arguments::Place { sort_index })]
}

/// Returns the number of a thread; numbers begin at 1, since 0 stands for an idle processor.
const fn thread(lane: Lane) -> usize {
    match lane {
        Lane::Host => 1,
        Lane::Computation => 2,
        Lane::Collectives(stream) => 3 + stream,
    }
}

const fn nanoseconds(time: Time) -> u64 {
    time.picoseconds().saturating_add(500) / 1000
}

/// Exact, in the shortest decimal, below 2^53 nanoseconds, which are 104 days.
fn micros(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1000.0
}
