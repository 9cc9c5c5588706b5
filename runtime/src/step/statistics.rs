//! The statistics of a pass: sums over all ranks in the midst of a unit's forward and backward.

use hsdp_comm::{Pending, Reduction, Stage};
use hsdp_sharding::step::{Operation, Source};
use hsdp_sharding::{Phase, UnitId};

use crate::error::Error;
use crate::state::context::Context;
use crate::step::reductions::StepPlace;

/// The statistics of the open microbatch.
#[derive(Debug, Default)]
pub(super) struct StatisticsSums {
    /// The statistics that the program has given, until they are issued.
    own: Option<Vec<f64>>,
    /// The sums that the program waits for, when they are there.
    sums: Option<Vec<f64>>,
    under_way: Vec<StatisticsOperation>,
}

/// A sum that is under way.
#[derive(Debug)]
struct StatisticsOperation {
    operation: Operation,
    from: Source,
    pending: Pending<Vec<f64>>,
}

impl StatisticsSums {
    /// Takes the statistics of the program, for the next output about them.
    pub(super) fn give(&mut self, own: Vec<f64>) {
        self.own = Some(own);
    }

    /// Returns the sums of the program's statistics.
    ///
    /// # Panics
    /// If the machine has not answered yet.
    pub(super) fn take(&mut self) -> Vec<f64> {
        self.sums.take().expect("the machine waits for the sums of given statistics")
    }

    /// Issues the sum of statistics of a unit.
    pub(super) fn issue(
        &mut self,
        context: &Context,
        at: StepPlace,
        unit: UnitId,
        index: usize,
        phase: Phase,
        from: Source,
    ) -> Result<(), Error> {
        let elements = context.plan.spec()[unit].statistics[index].elements(phase);
        let values = match from {
            Source::Offered => self.own.take().expect("the program has given them"),
            // Zeros for others may come first.
            _ => vec![0.0; elements],
        };
        let tag = context.tag(Some(unit), Stage::Statistics, at.step, at.microbatch);
        let pending = context.statistics.all_reduce(tag, Reduction::Sum, values)?;
        let operation = Operation::Statistics { unit, index, phase };
        self.under_way.push(StatisticsOperation { operation, from, pending });
        Ok(())
    }

    /// Waits for an operation.
    pub(super) fn wait(&mut self, operation: Operation) -> Result<(), Error> {
        let at = self.under_way.iter().position(|it| it.operation == operation);
        let StatisticsOperation { from, pending, .. } =
            self.under_way.remove(at.expect("it was issued"));
        let sums = pending.wait()?;
        if from == Source::Offered {
            self.sums = Some(sums);
        }
        Ok(())
    }
}
