//! The end of a step: reductions complete, all ranks agree, and the divisor is known.

use std::mem;
use std::sync::atomic::Ordering;

use hsdp_comm::Stage;
use hsdp_kernels::cuda::Seen;
use hsdp_sharding::step::Conclusion;
use hsdp_sharding::{ParamId, Unit, UnitId};

use crate::agree::agreement::{Agreement, Statement};
use crate::error::gradients::{NonFiniteGradient, Origin};
use crate::error::{DataError, Error, GradientError};
use crate::options::NonFinite;
use crate::options::divide::final_divisor;
use crate::options::objective::Objective;
use crate::state::context::Context;
use crate::state::model_id::ModelId;
use crate::state::sighting::{Sighting, When};
use crate::state::sums::{GradShards, GradientSums};
use crate::step::attempt::Opened;
use crate::step::clipping::Clipping;
use crate::step::engine::{Engine, NO_ATTEMPT};
use crate::step::gradients::{Gradients, Verdict};
use crate::step::reductions::StepPlace;
use crate::step::state::State;
use crate::step::step_state::StepState;
use crate::step::unused;

impl Engine {
    /// Finishes the reductions, agrees with all ranks, and returns the gradients.
    ///
    /// An error before the agreement leaves the step open, for its owner to abort. The errors of
    /// the agreement itself are the same on all ranks: the step is over then, and needs no
    /// announcement.
    pub(crate) fn finish_step(&self, opened: Opened) -> Result<Gradients, Error> {
        let mut state = self.in_step(opened, "finish")?;
        state.attempt(&self.context, "finish", |state| {
            let asked = state.machine.finish();
            asked.map_err(|refused| state.refused(&self.context, "finish", refused))?;
            state.drive(&self.context, "finish").map(drop)
        })?;
        state.attempt = None;
        let mut step = state.step.take().expect("it was there a moment ago");
        self.under_way.store(NO_ATTEMPT, Ordering::Release);
        if state.machine.is_settled() {
            self.context.settle(state.machine.plan());
        }
        state.next_step += 1;
        state.last_weight = step.largest_weight;
        let (grad_shards, agreement) = step.ended.take().expect("all ranks have agreed");
        let ended =
            Ended { id: &self.id, context: &self.context, step: &step, agreement: &agreement };
        ended.gradients(&mut state, grad_shards)
    }
}

impl State {
    /// Exchanges statements with all ranks, when the reductions of the step are complete.
    pub(super) fn state_step(&mut self, context: &Context) -> Result<Conclusion, Error> {
        let StepPlace { step: number, microbatch } = self.place();
        let microbatches = self.machine.microbatches() as u64;
        let grad_shards = GradShards::new(self.reductions.take_sums(), &self.kept);
        let seen = GradientSums::survey(&context.site("norm", number), grad_shards.all())?;
        let step = self.step.as_mut().expect("a step is under way");
        let statement = Statement {
            microbatches,
            weight: step.weight,
            loss: step.total_loss,
            squared_norm: seen.iter().map(|seen| seen.squared_norm).sum(),
            sighting: None,
            operations: context.operations_word(),
            presence: mem::take(&mut step.presence),
        };
        let found = self.reductions.sighting_of_step(context, number, grad_shards.all())?;
        let sighting = found.or_else(|| first_after_all_reduce(context, &statement, &seen));
        let statement = Statement { sighting, ..statement };
        let tag = context.tag(None, Stage::Agreement, number, microbatch);
        let ranks = context.plan.mesh().world_size();
        let decode = |said: &[u64]| Agreement::decode(said, ranks, context.parameters());
        let agreement = context.control.exchange_in_step(tag, statement.words(), decode)?;
        context.check_operations(agreement.operations())?;
        step.ended = Some((grad_shards, agreement));
        Ok(Conclusion::Agreed)
    }
}

/// Returns the first element that is not finite though this rank's partials were, in the plan's
/// order.
fn first_after_all_reduce(
    context: &Context,
    statement: &Statement,
    seen: &[Seen],
) -> Option<Sighting> {
    if statement.squared_norm.is_finite() {
        return None;
    }
    seen.iter().enumerate().find_map(|(unit, seen)| {
        let at = usize::try_from(seen.first_non_finite?).unwrap_or(usize::MAX);
        let parameter = context.parameter_at(UnitId::new(unit), at)?;
        Some(Sighting { when: When::AllReduce, parameter, from: None })
    })
}

/// A step on which all ranks have agreed.
struct Ended<'a> {
    id: &'a ModelId,
    context: &'a Context,
    step: &'a StepState,
    agreement: &'a Agreement,
}

impl Ended<'_> {
    fn gradients(
        &self,
        state: &mut State,
        mut grad_shards: GradShards,
    ) -> Result<Gradients, Error> {
        grad_shards.present = self.present();
        unused::check_each_rank(self.context, self.step.number, self.agreement)?;
        let weight = self.weight()?;
        let divisor = final_divisor(
            self.context.options.objective,
            weight,
            self.step.exponent.unwrap_or(0),
            state.loss_scale.value(),
        );
        let squared = self.agreement.squared_norm(self.context.plan.mesh(), self.context.rank());
        let verdict = self.verdict(state, squared.sqrt(), divisor)?;
        match verdict {
            Verdict::Apply => {
                unused::check_first(self.context, self.step.number, self.agreement)?;
                grad_shards.await_update(self.step.number);
                state.loss_scale.after_finite_step();
            }
            Verdict::Skip(_) => state.loss_scale.after_overflow(),
        }
        Ok(Gradients {
            step: self.step.number,
            model: self.id.clone(),
            divisor: if verdict == Verdict::Apply { divisor } else { 1.0 },
            grad_shards,
            norm: squared.sqrt() / divisor,
            loss: self.loss(weight),
            weight,
            clip: 1.0,
            max_norm: None,
            clipping: Clipping::default(),
            verdict,
            is_measured: false,
        })
    }

    /// Returns by unit and parameter whether it got a gradient on any rank.
    fn present(&self) -> Vec<Vec<bool>> {
        let anywhere = self.agreement.present_anywhere();
        let is_present = |id| anywhere.contains(self.context.number_of(id));
        let units = self.context.plan.spec().units().iter().enumerate();
        let of_unit = |(unit, it): (usize, &Unit)| {
            let ids = (0..it.params.len()).map(|index| ParamId { unit: UnitId::new(unit), index });
            ids.map(is_present).collect()
        };
        units.map(of_unit).collect()
    }

    #[expect(clippy::cast_precision_loss, reason = "a loss is reported")]
    fn loss(&self, weight: u64) -> f64 {
        let total = self.agreement.total_loss();
        match self.context.options.objective {
            Objective::WeightedMean => total / weight as f64,
            Objective::RankMean => total / self.agreement.total_microbatches() as f64,
            Objective::Sum => total,
            Objective::Factor(factor) => total / factor,
        }
    }

    /// Returns the weight of the whole step.
    fn weight(&self) -> Result<u64, Error> {
        let step = self.step.number;
        match self.agreement.total_weight() {
            None => {
                let (heaviest, weight) = self.agreement.heaviest();
                let ranks = self.agreement.too_heavy();
                Err(Error::Data(DataError::WeightOverflow { step, ranks, heaviest, weight }))
            }
            Some(0) if self.context.options.objective == Objective::WeightedMean => {
                Err(Error::Data(DataError::EmptyStep {
                    step,
                    ranks: self.context.plan.mesh().ranks().collect(),
                }))
            }
            Some(weight) => Ok(weight),
        }
    }

    fn verdict(&self, state: &State, norm: f64, divisor: f64) -> Result<Verdict, Error> {
        let Some(origin) = self.origin(norm, divisor) else { return Ok(Verdict::Apply) };
        let found = NonFiniteGradient { step: self.step.number, origin };
        let skips = state.loss_scale.expects_overflow()
            || self.context.options.non_finite == NonFinite::Skip;
        if skips {
            Ok(Verdict::Skip(found))
        } else {
            Err(Error::Gradients(GradientError::NonFinite(found)))
        }
    }

    /// Returns the origin of a gradient or a loss that is not finite, if there is one. A loss comes
    /// first: the gradients follow from it.
    fn origin(&self, norm: f64, divisor: f64) -> Option<Origin> {
        if let Some(rank) = self.agreement.first_loss_not_finite() {
            return Some(Origin::Loss { rank });
        }
        let name_of = |parameter| self.context.name_of(parameter);
        if let Some(found) = self.agreement.first_non_finite() {
            return Some(found.sighting.origin(found.rank, name_of));
        }
        exceeds_f32(norm / divisor).then_some(Origin::Division { norm, divisor })
    }
}

/// Returns whether an element of a gradient of this norm may exceed f32: none is larger than the
/// norm. A norm that is NaN, though no rank has found an element that is, may be of any size.
fn exceeds_f32(norm: f64) -> bool {
    norm.is_nan() || norm > f64::from(f32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_norm_that_is_no_number_may_exceed_f32() {
        let norms = [0.0, 1e38, 1e39, f64::INFINITY, f64::NAN];
        assert_eq!(norms.map(exceeds_f32), [false, false, true, true, true]);
    }
}
