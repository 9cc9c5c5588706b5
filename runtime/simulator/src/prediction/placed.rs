//! Steps that are predicted many times, as by a fit.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use hsdp_sharding::{Mesh, Offload, Plan, PlanOptions, State};

use super::{MeshGroups, OnMachine, PlanSizes, Workload, check_update, placement};
use crate::calibrate::{AllReduceRow, StepRow};
use crate::host::{Microbatches, Order};
use crate::simulation::{Timing, simulate_among};
use crate::{
    Batch, CollectiveKind, Computation, Error, GptShape, Machine, Shapes, Time, collective_cost,
};

/// Maximum number of ranks of all meshes together. They are placed in a second.
const MOST_RANKS: u64 = 10_000_000;

/// Maximum number of units in the steps of a fit, which simulates them up to 2,500 times.
const MOST_UNITS_OF_FIT: u64 = 500_000;

/// Places steps on the ranks of a machine. Steps on the same mesh share their groups.
#[derive(Debug)]
pub struct Placing<'a> {
    machine: &'a Machine,
    groups: HashMap<Mesh, Arc<MeshGroups>>,
    /// Ranks of all meshes together.
    ranks: u64,
    steps: u64,
    /// Units of all steps together, each counted for each kind of ranks.
    units: u64,
}

impl<'a> Placing<'a> {
    /// Begins without a step.
    #[must_use]
    pub fn new(machine: &'a Machine) -> Self {
        Self { machine, groups: HashMap::new(), ranks: 0, steps: 0, units: 0 }
    }

    /// Places a step.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the meshes of the steps up to this one have more than 10,000,000
    /// ranks, each mesh counted once. The errors of [`Workload::predict`], except
    /// [`Error::TooLong`].
    pub fn place(&mut self, workload: &Workload) -> Result<Placed, Error> {
        check_update(&workload.plan)?;
        let groups = self.groups(workload.plan.mesh())?;
        let kinds = groups.colors.len() as u64;
        let placed = Placed::among(workload, self.machine, groups)?;
        self.steps += 1;
        self.units = self.units.saturating_add(kinds.saturating_mul(placed.sizes.units() as u64));
        Ok(placed)
    }

    /// Refuses a fit that would take more than some three minutes on two cores.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the steps have more than 500,000 units, each counted for each kind of
    /// ranks.
    pub fn check_fit(&self) -> Result<(), Error> {
        let Self { steps, units, .. } = self;
        match *units > MOST_UNITS_OF_FIT {
            true => Err(Error::TooLarge {
                problem: format!(
                    "{steps} rows with {units} units, each counted for each kind of ranks: at most \
                     {MOST_UNITS_OF_FIT} are fitted"
                ),
            }),
            false => Ok(()),
        }
    }

    /// Returns the groups of a mesh, which are made once.
    fn groups(&mut self, mesh: Mesh) -> Result<Arc<MeshGroups>, Error> {
        if let Some(groups) = self.groups.get(&mesh) {
            return Ok(Arc::clone(groups));
        }
        self.ranks = self.ranks.saturating_add(mesh.world_size() as u64);
        if self.ranks > MOST_RANKS {
            let meshes = self.groups.len() + 1;
            let ranks = self.ranks;
            return Err(Error::TooLarge {
                problem: format!(
                    "the {meshes} meshes up to here have {ranks} ranks: expected at most \
                     {MOST_RANKS}"
                ),
            });
        }
        let groups = Arc::new(MeshGroups::new(mesh, self.machine)?);
        self.groups.insert(mesh, Arc::clone(&groups));
        Ok(groups)
    }
}

/// A step on the ranks of a machine, without the speeds of the machine. It is smaller than its
/// plan, and its time is found faster.
#[derive(Debug)]
pub struct Placed {
    cards: usize,
    computation: Arc<Computation>,
    batch: Batch,
    sizes: PlanSizes,
    order: Order,
    groups: Arc<MeshGroups>,
}

impl Placed {
    /// Places a step on groups that are placed.
    ///
    /// # Errors
    /// [`Error::Computation`] for an update of whole matrices.
    pub(crate) fn among(
        workload: &Workload,
        machine: &Machine,
        groups: Arc<MeshGroups>,
    ) -> Result<Self, Error> {
        Ok(Self {
            cards: machine.cards(),
            computation: Arc::clone(&workload.computation),
            batch: workload.batch,
            sizes: PlanSizes::of(&workload.plan, workload.offload)?,
            order: workload.order(machine),
            groups,
        })
    }

    /// Predicts the time on a machine that differs in its speeds alone from the one on which the
    /// step was placed.
    ///
    /// # Errors
    /// [`Error::Computation`] and [`Error::TooLong`], as [`Workload::predict`].
    ///
    /// # Panics
    /// If the machine has another number of cards, or the model elsewhere.
    pub fn time(&self, machine: &Machine) -> Result<Time, Error> {
        Ok(self.timing(machine)?.step)
    }

    /// Predicts the time and its parts, as [`time`](Self::time).
    pub(crate) fn timing(&self, machine: &Machine) -> Result<Timing, Error> {
        let Self { cards, computation, batch, sizes, order, groups } = self;
        assert_eq!(
            (machine.cards(), placement(machine)),
            (*cards, order.placement),
            "cards of the machine, and the placement of the model"
        );
        let costs = OnMachine::of(computation, batch, sizes, machine, Arc::clone(groups))?;
        let timing = simulate_among(order, &costs, groups.colors.clone())?;
        if timing.step == Time::MAX { Err(Error::TooLong) } else { Ok(timing) }
    }
}

impl StepRow {
    /// Returns the step that was measured, as hsdp makes it: AdamW with f32 masters, wire and
    /// parameters in the dtype of computation. A model that is not sharded stays gathered.
    /// All-reduces follow the last microbatch, as they do where its number is not given: the
    /// programs that were measured do so.
    ///
    /// # Errors
    /// Errors of a plan and of a computation.
    pub fn workload(&self) -> Result<Workload, Error> {
        let Self { ranks, shards, microbatches, batch, model } = *self;
        let spec = model.spec().updated_by(|_| State::Elements(2));
        let spec = if shards == 1 { spec.all_kept() } else { spec };
        let options = PlanOptions {
            param_dtype: batch.dtype,
            reduce_dtype: batch.dtype,
            ..PlanOptions::default()
        };
        Ok(Workload {
            plan: Arc::new(Plan::new(spec, Mesh::new(ranks / shards, shards)?, options)?),
            computation: Arc::new(model.computation()?),
            batch,
            microbatches: Microbatches::Asked(microbatches as u64),
            offload: Offload::None,
        })
    }
}

/// The columns that tell rows apart.
impl fmt::Display for StepRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranks, shards, microbatches, batch, model } = self;
        let GptShape { width, layers, .. } = model;
        write!(f, "{ranks} ranks")?;
        if *shards > 1 {
            write!(f, " in groups of {shards}")?;
        }
        let Batch { sequences, context, .. } = batch;
        write!(
            f,
            ", width {width}, {layers} layers, {microbatches} microbatches of {sequences} x {context} tokens"
        )
    }
}

impl AllReduceRow {
    /// Returns the predicted time on the cards of a machine.
    ///
    /// # Errors
    /// [`Error::TooManyRanks`] if the machine has too few cards and no network.
    pub fn predict(&self, machine: &Machine) -> Result<Time, Error> {
        let group = Shapes::new(Mesh::new(1, self.members)?, machine)?.world();
        Ok(collective_cost(machine, &group, CollectiveKind::AllReduce, self.bytes).time)
    }
}

impl fmt::Display for AllReduceRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ranks, {} bytes", self.members, self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibrate::read_steps;

    /// Returns the steps of rows `gpus,shards,layers`.
    fn steps(rows: &[[usize; 3]]) -> Vec<Workload> {
        let header = "gpus,shards,global_batch,micro_batch,width,heads,layers,context,step_ms\n";
        let row = |[gpus, shards, layers]: &[usize; 3]| {
            format!("{gpus},{shards},{},2,64,4,{layers},60,1\n", gpus * 6)
        };
        let table = rows.iter().map(row).collect::<String>();
        let rows = read_steps(&format!("{header}{table}")).expect("a table");
        rows.iter().map(|(row, _)| row.workload().expect("a step")).collect()
    }

    fn machine(name: &str, cards: f64) -> Machine {
        let mut machine = Machine::bundled(name).expect("bundled");
        machine.set("ranks", cards, "a test").expect("possible");
        machine
    }

    #[test]
    fn a_placed_step_takes_the_time_of_its_workload() {
        let rows = [[1, 1, 1], [2, 1, 3], [4, 4, 5], [6, 3, 2], [12, 3, 4], [24, 4, 7]];
        for mut machine in [
            machine("a100-node", 24.0),
            machine("a100-cluster", 4.0),
            machine("two-core-cpu", 24.0),
        ] {
            let steps = steps(&rows);
            let mut placing = Placing::new(&machine);
            let placed: Vec<_> =
                steps.iter().map(|it| placing.place(it).expect("placed")).collect();
            for efficiency in [0.9, 0.3, 1e-3] {
                for (placed, step) in placed.iter().zip(&steps) {
                    let predicted = step.predict(&machine).map(|it| it.timing.step);
                    assert_eq!(placed.time(&machine), predicted);
                }
                // The numbers that a fit changes.
                for name in crate::StepRow::numbers(&machine) {
                    let value = match *name {
                        "compute.half" => 2e9,
                        "compute.launch" | "compute.kernel" => 2e-5,
                        _ => efficiency,
                    };
                    machine.set(name, value, "a test").expect("possible");
                }
            }
        }
    }

    /// Each unit counts once for each kind of ranks: groups of 11 lie on machines of 8 in ten ways.
    #[test]
    fn the_units_of_a_fit_are_bounded() {
        for (cards, kinds) in [(11.0, 1), (8.0, 10)] {
            let machine = machine("a100-cluster", cards);
            let mut placing = Placing::new(&machine);
            let [few, many] = &steps(&[[9999, 11, 1], [9999, 11, 98]])[..] else {
                panic!("two steps")
            };
            placing.place(many).expect("placed");
            assert_eq!(placing.units, 100 * kinds);
            let fits = MOST_UNITS_OF_FIT / placing.units;
            placing.units *= fits;
            placing.steps *= fits;
            assert_eq!((placing.units, placing.check_fit()), (MOST_UNITS_OF_FIT, Ok(())));
            placing.place(few).expect("placed");
            let problem = format!(
                "{} rows with {} units, each counted for each kind of ranks: at most 500000 are \
                 fitted",
                fits + 1,
                500_000 + 3 * kinds
            );
            assert_eq!(placing.check_fit(), Err(Error::TooLarge { problem }));
        }
    }

    /// A mesh counts once, whatever the number of its steps.
    #[test]
    fn the_ranks_of_all_meshes_are_bounded() {
        let machine = machine("a100-cluster", 8.0);
        let mut placing = Placing::new(&machine);
        let [two, again, four] = &steps(&[[2, 1, 1], [2, 1, 3], [4, 1, 1]])[..] else {
            panic!("three steps")
        };
        placing.ranks = MOST_RANKS - 2;
        placing.place(two).expect("placed");
        placing.place(again).expect("placed");
        assert_eq!(placing.ranks, MOST_RANKS);
        let problem =
            "the 2 meshes up to here have 10000004 ranks: expected at most 10000000".to_owned();
        assert_eq!(placing.place(four).err(), Some(Error::TooLarge { problem }));
    }
}
