//! Optimizers that update each element from its gradient and its own state, as a rule says.

use hsdp_kernels::cuda::{CudaError, PieceOfStep};
use hsdp_sharding::{Param, ParamId, Piece, UnitId};

use crate::error::Error;
use crate::model::ShardedModel;
use crate::optimizer::covered::Covered;
use crate::optimizer::grouped::Grouped;
use crate::optimizer::groups::Groups;
use crate::optimizer::held::{Held, Kinds, tensors_of};
use crate::optimizer::method::{Method, Traits, Updates};
use crate::optimizer::rule::{Rule, RunState, UnitRun, UnitState};
use crate::optimizer::run::{DeviceRun, Run, reborrow};
use crate::persist::checkpointed::StateTensor;
use crate::state::context::ErrorSite;

impl<O: Rule> Grouped<O> {
    /// An optimizer that updates each element of this rank's shards of `model` by a rule, from its gradient and its own state, which is f32.
    #[must_use]
    pub fn new(model: &ShardedModel, options: O) -> Self {
        Self::of(model, &ByRule, options)
    }
}

/// The method of a rule.
#[derive(Debug)]
struct ByRule;

impl<O: Rule> Method<O> for ByRule {
    fn kind(&self) -> &'static str {
        O::KIND
    }

    fn traits(&self) -> Traits {
        Traits { counts: O::COUNTS, is_collective: false, on_device: O::ON_DEVICE }
    }

    fn kinds(&self, options: &O) -> Kinds {
        options.kinds()
    }

    fn tensors(&self, options: &O, id: ParamId, _: &Param) -> Vec<StateTensor> {
        tensors_of(options.kinds(), id)
    }

    fn check(&self, groups: &Groups<O>) -> Result<(), Error> {
        let (kind, own) = (O::KIND, groups.options.kinds());
        match groups.of_groups().position(|options| options.kinds().len() > own.len()) {
            None => Ok(()),
            Some(group) => {
                let what = format!(
                    "{kind} group {group} needs state, and the options of the optimizer itself keep none"
                );
                Err(Error::Options { what })
            }
        }
    }

    fn zeros(
        &self,
        groups: &Groups<O>,
        site: ErrorSite<'_>,
        has: &dyn Fn(ParamId) -> bool,
    ) -> Result<Box<dyn Updates<O>>, Error> {
        Ok(Box::new(Held::zeros(site, groups.options.kinds(), has)?))
    }
}

impl<O: Rule> Updates<O> for Held {
    fn update(&mut self, groups: &Groups<O>, run: Run<'_>) {
        let Self { covered, states, .. } = self;
        let (unit, range) = (run.unit, covered.places.of_piece(run.unit, &run.piece));
        let number = covered.count(ParamId { unit, index: run.piece.param });
        let options = groups.of(unit, run.piece.param);
        options.update(number, run, RunState { states, unit, range });
    }

    fn update_on_device(
        &mut self,
        groups: &Groups<O>,
        DeviceRun { unit, stream, mut update, pieces, clip }: DeviceRun<'_>,
    ) -> Result<(), CudaError> {
        let Self { covered, states, .. } = self;
        for (options, has) in groups.each() {
            let pieces = pieces.iter().filter(|piece| has(unit, piece.param));
            let pieces: Vec<_> = pieces.map(|piece| piece_of_step(covered, unit, piece)).collect();
            if !pieces.is_empty() {
                let run = UnitRun { stream, update: reborrow(&mut update), clip };
                options.update_on_device(run, &pieces, UnitState { states, unit })?;
            }
        }
        Ok(())
    }
}

/// A piece for a kernel, with the number of its update.
fn piece_of_step(covered: &Covered, unit: UnitId, piece: &Piece) -> PieceOfStep {
    let step = covered.count(ParamId { unit, index: piece.param });
    let state = covered.places.of_piece(unit, piece).start;
    PieceOfStep { range: piece.shard_range(), state, step }
}
