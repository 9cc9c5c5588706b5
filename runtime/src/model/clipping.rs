//! Clipping of gradients by any norm and by value, of all parameters or of some.

use std::fmt::{self, Display, Write as _};

use hsdp_comm::{PartKind, Reduction};
use hsdp_sharding::{Param, Role};

use crate::error::Error;
use crate::model::ShardedModel;
use crate::model::norms::{over_shards, pieces};
use crate::options::digest;
use crate::state::context::Context;
use crate::state::control;
use crate::step::gradients::{Clip, Gradients, Verdict, is_limit};

/// A norm of gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Norm {
    /// The largest magnitude of an element.
    Infinity,
    /// The sum of the magnitudes to this power, to the power of its inverse. It is finite and above
    /// 0: 1, or 2 for the usual norm.
    P(f64),
}

impl Display for Norm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Infinity => f.write_str("infinity"),
            Self::P(power) => write!(f, "{power:?}"),
        }
    }
}

/// The parameters of a call.
struct Chosen {
    /// Whether a parameter is among them, by its number in the model.
    has: Vec<bool>,
    is_all: bool,
    /// Their number, and a digest of their names, for the comparison of ranks.
    text: String,
}

impl Gradients {
    /// Scales the gradients of the trainable parameters that `has` selects down to `max_norm` if
    /// their common norm is larger, by max_norm / (norm + 1e-6), as PyTorch's `clip_grad_norm_` of
    /// these parameters with this `norm_type`. Returns the gradients, and the norm before this
    /// call.
    ///
    /// Calls of this method and of [`clip_value`](Self::clip_value) count one after the other, each
    /// for what the earlier ones have left, and after [`clip`](Self::clip). A model that is updated
    /// on a device refuses an update whose parameters are clipped in different ways, before any
    /// parameter changes. If the ranks agreed to skip the step, nothing is clipped, and the norm is
    /// [`norm`](Self::norm).
    ///
    /// ```
    /// use hsdp::prelude::*;
    /// use hsdp::{Gradients, Norm};
    /// # fn step(model: &mut ShardedModel, adamw: &mut AdamW, gradients: Gradients) -> Result<(), hsdp::Error> {
    /// let is_head = |param: &Param| param.name.starts_with("head.");
    /// let (gradients, norm) = gradients.clip_norm(model, is_head, Norm::Infinity, 0.1)?;
    /// adamw.step(model, gradients.clip_value(model, |_| true, 0.5)?)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Collective over the shard group: one all-reduce of an f64, and two unless the norm is that
    /// of infinity. All ranks get the same bits. Sums are in f64, so their last bits depend on the
    /// number of shards; the norm of infinity is the same on every mesh. Gradients on a device are
    /// copied to the host.
    ///
    /// # Errors
    /// [`Error::Options`] if `max_norm` is NaN, below 0, or above 0 and 0 in f32, the power of the
    /// norm is not finite and above 0, or so small that the norm overflows f64, or `has` selects no
    /// trainable parameter; [`Error::Misuse`]
    /// if these are the gradients of another model; [`Error::Comm`] if an all-reduce fails;
    /// [`Error::Device`](Error) if the gradients lie on a device that fails.
    pub fn clip_norm(
        mut self,
        model: &ShardedModel,
        has: impl Fn(&Param) -> bool,
        norm: Norm,
        max_norm: f64,
    ) -> Result<(Self, f64), Error> {
        let context = &model.engine.context;
        let (chosen, found) = control::between_steps(&context.world, self.step, || {
            let chosen = self.chosen(model, has)?;
            if let Norm::P(power) = norm
                && !(power.is_finite() && power > 0.0)
            {
                let what = format!("gradients cannot be clipped by a norm of power {power:?}");
                return Err(Error::Options { what });
            }
            check_limit("a norm", max_norm)?;
            let found = match self.verdict {
                Verdict::Apply => self.norm_of(context, &chosen, norm)?,
                Verdict::Skip(_) => self.norm,
            };
            if self.verdict == Verdict::Apply && !found.is_finite() {
                let what = format!("gradients cannot be clipped by norm {norm}: it overflows f64");
                return Err(Error::Options { what });
            }
            Ok((chosen, found))
        })?;
        if self.verdict == Verdict::Apply {
            #[expect(
                clippy::cast_possible_truncation,
                reason = "a factor of at most 1, applied in f32"
            )]
            let factor = (max_norm / (found + 1e-6)).min(1.0) as f32;
            if chosen.is_all && self.clipping.of_parameters.is_empty() {
                self.clip *= factor;
            } else {
                self.change(&chosen, |clip| clip.scaled(factor));
            }
        }
        let Chosen { text, .. } = &chosen;
        writeln!(self.clipping.lines, "gradients of {text} clipped to {max_norm:?} by norm {norm}")
            .expect("a string takes any text");
        Ok((self, found))
    }

    /// Limits each element of the gradients of the trainable parameters that `has` selects to
    /// `limit` in magnitude, as PyTorch's `clip_grad_value_` of these parameters. The order of
    /// calls counts as for [`clip_norm`](Self::clip_norm). The optimizer's pass over the shard does
    /// it. A model that is updated on a device refuses such an update, before any parameter
    /// changes.
    ///
    /// Not collective; all ranks make the same call.
    ///
    /// # Errors
    /// [`Error::Options`] if `limit` is NaN, below 0, or above 0 and 0 in f32, or `has` selects no
    /// trainable parameter; [`Error::Misuse`] if these are the gradients of another model.
    pub fn clip_value(
        mut self,
        model: &ShardedModel,
        has: impl Fn(&Param) -> bool,
        limit: f64,
    ) -> Result<Self, Error> {
        let chosen = control::between_steps(&model.engine.context.world, self.step, || {
            check_limit("a value", limit)?;
            self.chosen(model, has)
        })?;
        #[expect(clippy::cast_possible_truncation, reason = "gradients are f32")]
        self.change(&chosen, |clip| clip.limited(limit as f32));
        let Chosen { text, .. } = &chosen;
        writeln!(self.clipping.lines, "gradients of {text} clipped to a value of {limit:?}")
            .expect("a string takes any text");
        Ok(self)
    }

    fn chosen(&self, model: &ShardedModel, has: impl Fn(&Param) -> bool) -> Result<Chosen, Error> {
        let context = &model.engine.context;
        if self.model != *model.id() {
            let what = "these are the gradients of another model".to_owned();
            return Err(context.misuse("clipping", self.step, what));
        }
        let (mut chosen, mut names, mut trained) =
            (vec![false; context.parameters()], Vec::new(), 0);
        for (id, param) in context.plan.spec().params() {
            if param.role == Role::Trainable {
                trained += 1;
                if has(param) {
                    chosen[context.number_of(id)] = true;
                    names.push(param.name.clone());
                }
            }
        }
        if names.is_empty() {
            let what = "gradients cannot be clipped: no trainable parameter is selected";
            return Err(Error::Options { what: what.to_owned() });
        }
        let text = format!("{} parameters, names {:#018x},", names.len(), digest::of_lines(&names));
        Ok(Chosen { has: chosen, is_all: names.len() == trained, text })
    }

    fn change(&mut self, chosen: &Chosen, change: impl Fn(Clip) -> Clip) {
        if self.clipping.of_parameters.is_empty() {
            self.clipping.of_parameters = vec![Clip::by(self.clip); chosen.has.len()];
        }
        let all = self.clipping.of_parameters.iter_mut().zip(&chosen.has);
        all.filter(|(_, has)| **has).for_each(|(clip, _)| *clip = change(*clip));
    }

    /// Returns the norm of the chosen gradients as they are clipped so far. Collective over the
    /// shard group.
    fn norm_of(&self, context: &Context, chosen: &Chosen, norm: Norm) -> Result<f64, Error> {
        let reduced = |by: Reduction, own: f64| {
            let part = Some(PartKind::Gradients);
            Ok::<f64, Error>(over_shards(context, self.step, part, by, vec![own])?[0])
        };
        let largest = reduced(Reduction::Max, self.fold(context, chosen, 0.0, f64::max)?)?;
        let Norm::P(power) = norm else { return Ok(largest) };
        if largest == 0.0 {
            return Ok(0.0);
        }
        // Relative to the largest one no power overflows. The usual powers need no `powf`, which
        // takes ten times as long.
        let add = |sum: f64, it: f64| {
            let relative = it / largest;
            sum + if power == 1.0 {
                relative
            } else if power == 2.0 {
                relative * relative
            } else {
                relative.powf(power)
            }
        };
        let sum = reduced(Reduction::Sum, self.fold(context, chosen, 0.0, add)?)?;
        Ok(largest * sum.powf(power.recip()))
    }

    /// Folds the magnitudes of the chosen elements on this rank, as they are clipped so far.
    fn fold(
        &self,
        context: &Context,
        chosen: &Chosen,
        start: f64,
        fold: impl Fn(f64, f64) -> f64,
    ) -> Result<f64, Error> {
        let mut folded = start;
        for unit in context.plan.reductions().iter().copied() {
            let elements = self.sums_on_host(context, unit)?;
            for (number, range) in pieces(context, unit, elements.len()) {
                if chosen.has[number] {
                    let clip = self.clip_of_number(number);
                    let magnitudes = elements[range].iter();
                    let magnitudes = magnitudes.map(|it| clip.magnitude(*it, self.divisor));
                    folded = magnitudes.fold(folded, &fold);
                }
            }
        }
        Ok(folded)
    }

    fn clip_of_number(&self, number: usize) -> Clip {
        let clip = self.clipping.of_parameters.get(number).copied();
        clip.unwrap_or(Clip::by(self.clip))
    }
}

fn check_limit(what: &str, limit: f64) -> Result<(), Error> {
    if is_limit(limit) {
        return Ok(());
    }
    Err(Error::Options { what: format!("gradients cannot be clipped to {what} of {limit:?}") })
}
