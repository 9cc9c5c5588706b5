//! The tables, and the predictions of what is left out of a fit.

use hsdp_simulator::{
    AllReduceRow, Error, Errors, Fitted, Machine, Measurements, Placed, Placing, StepRow, Time,
    fit, read_all_reduces, read_steps,
};

const ALL_REDUCES: &str = include_str!("../../../runtime/simulator/tests/a100_node_all_reduce.csv");
const NODE: &str = include_str!("../../../runtime/simulator/tests/a100_node_steps.csv");
const CORES: &str = include_str!("../../../runtime/simulator/tests/cpu_steps.csv");
const CORES_HELD_OUT: &str = include_str!("../../../runtime/simulator/tests/cpu_held_out.csv");

type Steps = Vec<(StepRow, Time)>;

/// Steps that a machine was not fitted to.
pub(crate) struct Held {
    pub(crate) name: &'static str,
    /// The number of steps to which it was.
    pub(crate) fitted_to: usize,
    pub(crate) numbers: Vec<Fitted>,
    /// By step: the predicted and the measured time.
    pub(crate) steps: Vec<(StepRow, (Time, Time))>,
    /// The mean and the largest error that may be.
    pub(crate) most: [f64; 2],
}

impl Held {
    pub(crate) fn errors(&self) -> Errors {
        Errors::of(self.steps.iter().map(|(_, times)| *times))
    }
}

/// A node of A100: every third step is left out.
pub(crate) fn node() -> Result<Held, Error> {
    let all_reduces = read_all_reduces(ALL_REDUCES)?;
    let rows = Measurements { table: "a100_node_all_reduce.csv", rows: &all_reduces };
    let node = Machine::bundled("a100-node")?;
    let links = fit(&node, &AllReduceRow::NUMBERS, &rows, |node, row| row.predict(node))?;
    let steps = read_steps(NODE)?.into_iter().enumerate();
    let (left_out, others): (Vec<_>, Vec<_>) = steps.partition(|(index, _)| index % 3 == 0);
    let [left_out, others] =
        [left_out, others].map(|part| part.into_iter().map(|(_, row)| row).collect());
    let held = predict("a node of A100", [0.03, 0.08], &links.machine, [others, left_out])?;
    Ok(Held { numbers: [links.numbers, held.numbers].concat(), ..held })
}

/// Two cores.
pub(crate) fn cores() -> Result<Held, Error> {
    let cores = Machine::bundled("two-core-cpu")?;
    predict("two cores", [0.08, 0.2], &cores, [read_steps(CORES)?, read_steps(CORES_HELD_OUT)?])
}

/// Fits the machine to some steps, and predicts others.
fn predict(
    name: &'static str,
    most: [f64; 2],
    machine: &Machine,
    [to, others]: [Steps; 2],
) -> Result<Held, Error> {
    let mut placing = Placing::new(machine);
    let mut place = |row: &StepRow| placing.place(&row.workload()?);
    let prepared = to.iter().map(|(row, time)| Ok((place(row)?, *time)));
    let prepared = prepared.collect::<Result<Vec<_>, Error>>()?;
    let rows = Measurements { table: name, rows: &prepared };
    let fitted = fit(machine, StepRow::numbers(machine), &rows, |it, step: &Placed| step.time(it))?;
    let step = |(row, measured): (StepRow, Time)| {
        Ok((row, (place(&row)?.time(&fitted.machine)?, measured)))
    };
    let steps = others.into_iter().map(step).collect::<Result<_, Error>>()?;
    Ok(Held { name, fitted_to: to.len(), numbers: fitted.numbers, steps, most })
}
