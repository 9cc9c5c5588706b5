//! The time of a step of pure data parallelism, unit by unit, without events.

use hsdp_sharding::UnitId;
use hsdp_simulator::{
    AllReduceRow, CollectiveKind, Computation, Error, Fit, Machine, Measurements, Processor,
    Shapes, StepRow, Time, WorkCost, collective_cost, fit, read_all_reduces, read_steps,
};

pub(crate) const STEPS: &str = include_str!("../../a100_node_steps.csv");
pub(crate) const ALL_REDUCES: &str = include_str!("../../a100_node_all_reduce.csv");

/// Bytes by element of an AdamW with f32 masters: three f32 read and written, an f16 gradient read, and an f16 parameter written.
const UPDATE: u64 = 28;

/// A step, with what its model computes.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    pub(crate) row: StepRow,
    computation: Computation,
    elements: u64,
}

/// The steps of a table, with their times.
pub(crate) fn steps(text: &str) -> Vec<(Measured, Time)> {
    let rows = read_steps(text).expect("a table");
    rows.into_iter().map(|(row, time)| (Measured::new(row), time)).collect()
}

/// The fit of a machine's computation to steps.
pub(crate) fn fitted(machine: &Machine, rows: &[(Measured, Time)]) -> Result<Fit, Error> {
    let measurements = Measurements { table: "steps", rows };
    fit(machine, StepRow::numbers(machine), &measurements, Measured::predict)
}

/// The A100 node, with links that are fitted to the table of all-reduces.
pub(crate) fn a100_with_links() -> Fit {
    let rows = read_all_reduces(ALL_REDUCES).expect("a table");
    let machine = Machine::bundled("a100-node").expect("bundled");
    let measurements = Measurements { table: "all-reduces", rows: &rows };
    let predict =
        |machine: &Machine, row: &AllReduceRow| reduction(machine, row.members, row.bytes);
    fit(&machine, &AllReduceRow::NUMBERS, &measurements, predict).expect("links fit")
}

fn reduction(machine: &Machine, members: usize, bytes: u64) -> Result<Time, Error> {
    let mesh = format!("{members}x1").parse()?;
    let world = Shapes::new(mesh, machine)?.world();
    Ok(collective_cost(machine, &world, CollectiveKind::AllReduce, bytes).time)
}

impl Measured {
    fn new(row: StepRow) -> Self {
        let computation = row.model.computation().expect("a GPT");
        Self { row, computation, elements: row.model.spec().numel().0 }
    }

    /// The time of the step: the host launches, and reads the loss of each microbatch; the device follows.
    pub(crate) fn predict(machine: &Machine, measured: &Self) -> Result<Time, Error> {
        let Self { row, computation, elements } = measured;
        let on = Processor::new(machine, row.batch.dtype, row.ranks)?;
        // The embedding, a block, and the norm.
        let layers = row.model.layers;
        let units =
            [(0, 1), (1, layers), (layers + 1, 1)].map(|(it, times)| (UnitId::new(it), times));
        let forwards = units.map(|(it, times)| (computation.forward(it, &row.batch, &on), times));
        let backwards = units.map(|(it, times)| (computation.backward(it, &row.batch, &on), times));
        let loss = computation.loss(&row.batch, &on);
        let mut timeline = Timeline::default();
        for _ in 0..row.microbatches {
            forwards.iter().for_each(|(work, times)| timeline.compute(work, *times));
            timeline.compute(&loss, 1);
            timeline.read();
            backwards.iter().rev().for_each(|(work, times)| timeline.compute(work, *times));
        }
        timeline.device += reduction(machine, row.ranks, 2 * elements)?;
        timeline.compute(&on.pass(UPDATE * elements), 1);
        Ok(timeline.host.max(timeline.device))
    }
}

/// When the host and the device are done.
#[derive(Default)]
struct Timeline {
    host: Time,
    device: Time,
}

impl Timeline {
    fn compute(&mut self, work: &WorkCost, times: usize) {
        for _ in 0..times {
            let begins = self.device.max(self.host);
            self.host += work.host;
            self.device = (begins + work.device).max(self.host);
        }
    }

    fn read(&mut self) {
        self.host = self.host.max(self.device);
    }
}
