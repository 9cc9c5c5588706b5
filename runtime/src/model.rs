//! A model whose parameters are sharded over a mesh.

use std::collections::BTreeMap;
use std::sync::Arc;

use hsdp_comm::World;
use hsdp_sharding::{FullCopies, ModelSpec, Param, Piece, Plan, Rank, UnitId};

use crate::comparison;
use crate::engine::events::Event;
use crate::engine::fabric::Fabric;
use crate::engine::shard::Shard;
use crate::engine::{Begun, Engine};
use crate::error::Error;
use crate::export;
use crate::options::{ModelOptions, StepOptions};
use crate::placement::Placement;
use crate::step::{NextStep, Step};
use crate::uneven::EndOfRun;

/// Which model of this process something belongs to.
#[derive(Clone, Debug)]
pub struct ModelId(Arc<()>);

impl ModelId {
    pub(crate) fn new() -> Self {
        Self(Arc::new(()))
    }
}

impl PartialEq for ModelId {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for ModelId {}

/// This rank's part of a model: the shards of its parameters, and the engine that gathers and reduces.
#[derive(Debug)]
pub struct ShardedModel {
    pub(crate) engine: Arc<Engine>,
}

impl ShardedModel {
    /// Plans the model, keeps this rank's shard of each parameter, and compares with all other ranks.
    ///
    /// `init` gives a parameter's full value in f32, row-major; it is called once a parameter, in the
    /// order of the spec, and must give the same on all ranks. Ranks that hold the same shard compare
    /// their bits, so replicas that were initialised differently are found here.
    ///
    /// Collective over the world.
    ///
    /// # Errors
    /// [`Error::Plan`] if the spec cannot be planned; [`Error::Options`] if an option makes no sense or
    /// the mesh does not have the world's size; [`Error::Size`] if `init` gives another number of elements;
    /// [`Error::Disagreement`] if ranks differ; [`Error::Comm`] if the comparison fails; on a device also `Error::Placement` if it cannot be
    /// used, and `Error::Device` if it has no room.
    pub fn new(
        world: World,
        spec: ModelSpec,
        options: ModelOptions,
        init: impl FnMut(&Param) -> Vec<f32>,
    ) -> Result<Self, Error> {
        let fabric = Self::fabric(world, spec, options)?;
        let shards = cut(&fabric, init)?;
        Self::of(fabric, shards)
    }

    /// What a model is made of, beside its parameters.
    pub(crate) fn fabric(
        world: World,
        spec: ModelSpec,
        options: ModelOptions,
    ) -> Result<Fabric, Error> {
        let options = options.checked()?;
        if options.mesh.world_size() != world.size() {
            return Err(Error::Options {
                what: format!(
                    "a mesh of {} has {} ranks, the world has {}",
                    options.mesh,
                    options.mesh.world_size(),
                    world.size()
                ),
            });
        }
        if options.full_copies == FullCopies::PerProcess && !world.shares_memory() {
            let what = "one full copy for all ranks, which are not threads of one process";
            return Err(Error::Options { what: what.to_owned() });
        }
        if options.full_copies == FullCopies::PerProcess && options.placement != Placement::Host {
            let what = "one full copy for all ranks, of a model that lies on a device";
            return Err(Error::Options { what: what.to_owned() });
        }
        let plan = Arc::new(Plan::new(spec, options.mesh, options.plan_options())?);
        Fabric::new(world, plan, options)
    }

    /// Of the shards of this rank: compares with all other ranks.
    pub(crate) fn of(fabric: Fabric, shards: Vec<Shard>) -> Result<Self, Error> {
        comparison::of_models(&fabric, &shards)?;
        Ok(Self { engine: Arc::new(Engine::new(fabric, shards)) })
    }

    /// The plan: layouts, schedule, memory and bytes.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.engine.fabric.plan
    }

    /// The world.
    #[must_use]
    pub fn world(&self) -> &World {
        &self.engine.fabric.world
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.engine.fabric.rank()
    }

    /// The options.
    #[must_use]
    pub fn options(&self) -> &ModelOptions {
        &self.engine.fabric.options
    }

    /// Begins a step: ranks exchange 64 bytes about it and find out whether they mean the same.
    ///
    /// Collective over the world. After an error that is not [fatal](Error::is_fatal) no step is open on this rank, and there
    /// is nothing to drop: it calls this again, as the others do, who may have been told by another error (`StepAborted`
    /// where one of them had begun the step already), or still wait for this rank's header.
    ///
    /// # Errors
    /// As [`next_step`](Self::next_step), and [`Error::EndOfData`] where that says that the run is over.
    pub fn begin_step(&mut self, options: StepOptions) -> Result<Step<'_>, Error> {
        match self.next_step(options)? {
            NextStep::Step(step) => Ok(step),
            NextStep::End(EndOfRun { step, supply }) => {
                Err(Error::EndOfData { step, microbatch: None, supply })
            }
        }
    }

    /// As [`begin_step`](Self::begin_step), for runs in which ranks may have more data than others: each says with
    /// [`StepOptions::input`] whether it has any, and all learn together whether there is a step.
    ///
    /// Collective over the world.
    ///
    /// # Errors
    /// [`Error::UnevenInputs`] if only some ranks have data and the model's [`Uneven`](crate::Uneven) refuses that, and
    /// [`Error::UnevenEnds`] if some [end their run](Self::end_run); [`Error::Disagreement`] if a rank is at another step, has another plan or other options;
    /// [`Error::Misuse`] for a step of no microbatches; [`Error::Comm`] if the exchange fails.
    pub fn next_step(&mut self, options: StepOptions) -> Result<NextStep<'_>, Error> {
        Ok(match self.engine.begin_step(options)? {
            Begun::Step(opened) => NextStep::Step(Step::new(Arc::clone(&self.engine), opened)),
            Begun::End(end) => NextStep::End(end),
        })
    }

    /// Says that this rank's run ends here, after as many steps as it has committed, and hears whether that is so on all
    /// ranks: the last call of a training loop. What is [collective](Self::full_parameters) may follow.
    ///
    /// A rank that ends its loop and does not say so has *left* as soon as its last handle of the world is gone: ranks that
    /// have another step then get `WorldAborted`, and the rank itself nothing at all.
    ///
    /// Collective over the world, with the [`next_step`](Self::next_step) of ranks that begin another one. Whoever asks there
    /// without data, or under [`Uneven::Stop`](crate::Uneven::Stop), is told of the end of the run.
    ///
    /// # Errors
    /// [`Error::UnevenEnds`] on all ranks, if another one has data for a step, unless that is to be left over
    /// ([`Uneven::Stop`](crate::Uneven::Stop)); [`Error::Disagreement`] if ranks have committed different numbers of steps;
    /// [`Error::Misuse`] if a step was neither finished nor dropped; [`Error::Comm`] if the exchange fails.
    pub fn end_run(&mut self) -> Result<(), Error> {
        self.engine.end_run()
    }

    /// Which model this is: an optimizer remembers for which one its state was made.
    #[must_use]
    pub fn id(&self) -> &ModelId {
        &self.engine.id
    }

    /// Steps that an optimizer has gone through, with an update or, where all ranks agreed to skip, without.
    #[must_use]
    pub fn committed_steps(&self) -> u64 {
        self.engine.state().committed
    }

    /// By what losses are multiplied in the next step.
    #[must_use]
    pub fn loss_scale(&self) -> f64 {
        self.engine.state().loss_scale.value()
    }

    /// This rank's shard of a unit's master parameters, in the layout's order: a handle of them, or a copy of those that lie on a
    /// device, which is waited for. As long as the handle is held, it keeps the values that it has.
    ///
    /// # Errors
    /// [`Error::Device`](Error) if they lie on a device that fails.
    ///
    /// # Panics
    /// If the model has no such unit.
    pub fn shard(&self, unit: UnitId) -> Result<Arc<Vec<f32>>, Error> {
        self.engine.state().shards[unit.index()].master(&self.engine.fabric)
    }

    /// All parameters in full, in f32, by name: for export, evaluation and tests.
    ///
    /// Collective over the shard group, one gather a unit, outside any step; every rank gets all of it.
    ///
    /// # Errors
    /// [`Error::Comm`] if a gather fails.
    pub fn full_parameters(&self) -> Result<BTreeMap<String, Vec<f32>>, Error> {
        let shards = self.engine.state().shards.clone();
        export::full_parameters(&self.engine.fabric, &shards)
    }

    /// Starts to record what the engine does.
    pub fn record_events(&self) {
        self.engine.fabric.events.record();
    }

    /// What was recorded since, in order; ends the recording.
    #[must_use]
    pub fn take_events(&self) -> Vec<Event> {
        self.engine.fabric.events.take()
    }
}

/// Keeps this rank's pieces of every parameter, also in the compute dtype.
fn cut(fabric: &Fabric, mut init: impl FnMut(&Param) -> Vec<f32>) -> Result<Vec<Shard>, Error> {
    let shard_index = fabric.plan.mesh().coordinate(fabric.rank()).shard_index;
    let mut shards = Vec::new();
    for (unit, spec) in fabric.plan.spec().units().iter().enumerate() {
        let layout = fabric.plan.layout(UnitId::new(unit));
        let mut shard = {
            let _shard = fabric.scope_of_masters();
            vec![0.0; layout.shard_len()]
        };
        let pieces: Vec<Piece> = layout.pieces(shard_index).collect();
        for (index, parameter) in spec.params.iter().enumerate() {
            let full = init(parameter);
            if full.len() != parameter.numel() {
                return Err(Error::Size {
                    operation: "init",
                    name: parameter.name.clone(),
                    rank: fabric.rank(),
                    got: full.len(),
                    want: parameter.numel(),
                });
            }
            for piece in pieces.iter().filter(|piece| piece.param == index) {
                shard[piece.shard_start..][..piece.len]
                    .copy_from_slice(&full[piece.param_start..][..piece.len]);
            }
        }
        shards.push(Shard::new(fabric, shard)?);
    }
    Ok(shards)
}
