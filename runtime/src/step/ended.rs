//! The end of a step on which all ranks have agreed: its gradients, or the error that follows.

use hsdp_sharding::{BufferRule, Param, ParamId, Role, Unit, UnitId};

use crate::agree::agreement::Agreement;
use crate::error::gradients::{NonFiniteGradient, Origin};
use crate::error::{DataError, Error, GradientError, Without};
use crate::options::divide::final_divisor;
use crate::options::objective::Objective;
use crate::options::precision::CurrentScale;
use crate::options::{NonFinite, Unused};
use crate::state::context::{Context, ModelId};
use crate::state::sums::GradShards;
use crate::step::gradients::{Clipping, Gradients, Verdict};
use crate::step::step_state::StepState;

/// A step on which all ranks have agreed.
pub(super) struct EndedStep<'a> {
    pub(super) id: &'a ModelId,
    pub(super) context: &'a Context,
    pub(super) step: &'a StepState,
    pub(super) agreement: &'a Agreement,
}

impl EndedStep<'_> {
    /// Returns the gradients of the step, and takes the loss scale on.
    pub(super) fn gradients(
        &self,
        loss_scale: &mut CurrentScale,
        mut grad_shards: GradShards,
    ) -> Result<Gradients, Error> {
        grad_shards.present = self.present();
        check_each_rank(self.context, self.step.number, self.agreement)?;
        let weight = self.weight()?;
        let divisor = final_divisor(
            self.context.options.objective,
            weight,
            self.step.exponent.unwrap_or(0),
            loss_scale.value(),
        );
        let squared = match self.agreement.first_non_finite() {
            // The sums of replicas differ if a step ends before its all-reduces, and each rank has
            // seen its slice alone.
            Some(_) => f64::NAN,
            None => self.agreement.squared_norm(),
        };
        let verdict = self.verdict(loss_scale, squared.sqrt(), divisor)?;
        match verdict {
            Verdict::Apply => {
                check_first(self.context, self.step.number, self.agreement)?;
                grad_shards.await_update(self.step.number);
                loss_scale.after_finite_step();
            }
            Verdict::Skip(_) => loss_scale.after_overflow(),
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

    fn verdict(
        &self,
        loss_scale: &CurrentScale,
        norm: f64,
        divisor: f64,
    ) -> Result<Verdict, Error> {
        let Some(origin) = self.origin(norm, divisor) else { return Ok(Verdict::Apply) };
        let found = NonFiniteGradient { step: self.step.number, origin };
        let skips =
            loss_scale.expects_overflow() || self.context.options.non_finite == NonFinite::Skip;
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

/// Refuses a step with parameters that got no gradient on some rank, under
/// [`Unused::ErrorOnAnyRank`]. All ranks come to the same end.
///
/// # Errors
/// [`GradientError::UnusedParameters`](crate::GradientError::UnusedParameters).
fn check_each_rank(context: &Context, step: u64, agreement: &Agreement) -> Result<(), Error> {
    if context.options.unused != Unused::ErrorOnAnyRank {
        return Ok(());
    }
    let objective = context.options.objective;
    let without = |number| (context.name_of(number), agreement.ranks_without(number, objective));
    let unused = trainable(context).map(without).filter(|(_, ranks)| !ranks.is_empty());
    let parameters: Vec<_> = unused.collect();
    if parameters.is_empty() {
        return Ok(());
    }
    Err(Error::Gradients(GradientError::UnusedParameters {
        step,
        parameters,
        causes: context.unused.causes(),
    }))
}

/// Refuses the first step, or warns of it on rank 0, if parameters got no gradient on any rank. A
/// model that has made steps before, in another process, is not refused. Under each policy, rank 0
/// warns of averaged buffers that no rank has written. A step that is refused, and one without
/// data, is followed by another first step. All ranks come to the same end.
///
/// # Errors
/// [`GradientError::WithoutGradient`](crate::GradientError::WithoutGradient).
fn check_first(context: &Context, step: u64, agreement: &Agreement) -> Result<(), Error> {
    let policy = context.options.unused;
    if context.unused.is_checked() || !agreement.had_data(context.options.objective) {
        return Ok(());
    }
    let anywhere = agreement.present_anywhere();
    let unused = trainable(context).filter(|number| !anywhere.contains(*number));
    let parameters: Vec<String> = unused.map(|number| context.name_of(number)).collect();
    let is_told = matches!(policy, Unused::ErrorInFirstStep | Unused::Warn);
    if !parameters.is_empty() && is_told {
        let trainable = trainable(context).count();
        let causes = context.unused.causes();
        if policy == Unused::ErrorInFirstStep && !context.unused.is_trained() {
            return Err(Error::Gradients(GradientError::WithoutGradient {
                step,
                trainable,
                parameters,
                causes,
            }));
        }
        if context.rank().index() == 0 {
            let without = Without::of(&parameters, trainable);
            let count = without.count();
            let names = without.names();
            hsdp_warnings::warn!(step, "{count}, and are not updated{causes}: {names}");
        }
    }
    if context.rank().index() == 0 {
        warn_of_unwritten(context, step, agreement);
    }
    context.unused.set_checked();
    Ok(())
}

/// Warns of averaged buffers that no rank has written: only a forward gives them values. Buffers
/// that ranks write equally may be constants.
fn warn_of_unwritten(context: &Context, step: u64, agreement: &Agreement) {
    let buffers = context.plan.spec().buffers().enumerate();
    let is_unwritten = |at: usize, buffer: &Param| {
        buffer.buffer == Some(BufferRule::Averaged) && !agreement.has_written(at)
    };
    let names = buffers.filter_map(|(at, (_, it))| is_unwritten(at, it).then_some(&*it.name));
    let names = names.collect::<Vec<_>>().join(", ");
    if !names.is_empty() {
        hsdp_warnings::warn!(
            step,
            "no rank has written these averaged buffers, and they keep their values: {names}; a \
             forward writes a buffer by `write_buffer`, and a layer of another library changes only \
             a copy; declare one that stays constant by `Param::buffer`"
        );
    }
}

/// Returns the numbers of the trainable parameters.
fn trainable(context: &Context) -> impl Iterator<Item = usize> {
    (0..context.parameters()).filter(|number| {
        let id = context.parameter(*number);
        context.plan.spec()[id].role == Role::Trainable
    })
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
