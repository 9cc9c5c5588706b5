//! Gradients together with their model: checks, copies, norms, and clipping by any norm and by
//! value.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Write as _};
use std::sync::Arc;

use hsdp_comm::{Part, PartKind, Reduction, Stage};
use hsdp_kernels::{Element, scaled_copy};
use hsdp_sharding::{Param, Role, UnitId};

use crate::error::Error;
use crate::model::norms::{
    COUNTS, CountedPiece, Histogram, Histograms, Norms, add_square, count, counted_pieces,
    over_ranks, trained, within,
};
use crate::model::{ShardedModel, export};
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
    /// Checks that these are the gradients of the last step of `model`. Not collective.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the gradients belong to another model, or to an earlier step; the
    /// message has both numbers.
    pub(crate) fn check_model(&self, model: &ShardedModel) -> Result<(), Error> {
        let refuse = |what| Err(model.engine.context.misuse("optimizer step", self.step, what));
        let finished = model.engine.state().next_step;
        if self.model != *model.id() {
            return refuse("these are the gradients of another model".to_owned());
        }
        if self.step + 1 != finished {
            return refuse(format!(
                "the gradients are those of step {}, the model has finished {finished} steps",
                self.step
            ));
        }
        Ok(())
    }

    /// Returns a copy of this rank's shard of a unit's gradient, in f32, in the layout's order,
    /// divided, before clipping; it is empty if the unit has no trainable parameter. Not
    /// collective.
    ///
    /// If the ranks agreed to skip the step, it holds the sums of the reductions without the
    /// division. With [`StateOver::World`](crate::StateOver::World) the elements outside of this
    /// rank's [slice](crate::Plan::slice) are 0: this rank has no sums of them.
    ///
    /// # Errors
    /// [`Error::Kernel`] if there is not enough memory; [`Error::Device`](Error) if the gradients
    /// lie on a device that fails.
    ///
    /// # Panics
    /// If the model has no such unit.
    pub fn shard(&self, model: &ShardedModel, unit: UnitId) -> Result<Vec<f32>, Error> {
        let site = model.engine.context.site("shard", self.step);
        let grad_shard = self.sums_on_host(site, unit)?;
        let mut divided = hsdp_kernels::zeros(grad_shard.len())?;
        let summed = match grad_shard.is_empty() {
            true => 0..0,
            false => model.engine.context.updated(unit),
        };
        scaled_copy(&mut divided[summed.clone()], &grad_shard[summed], self.divisor);
        Ok(divided)
    }

    /// Returns the whole gradients of all trainable parameters, in f32, row-major, by name,
    /// divided, before clipping. This is for tests and small models.
    ///
    /// Collective over the shard group, one gather for each unit, in the plan's order of
    /// reductions. Every rank gets all gradients. With
    /// [`StateOver::World`](crate::StateOver::World) collective over the world: slices are gathered
    /// over the replicas first.
    ///
    /// # Errors
    /// [`Error::Comm`] if a gather fails; [`Error::Kernel`] if there is not enough memory;
    /// [`Error::Device`](Error) if the gradients lie on a device that fails.
    pub fn full(&self, model: &ShardedModel) -> Result<BTreeMap<String, Vec<f32>>, Error> {
        let context = &model.engine.context;
        control::between_steps(&context.world, self.step, || {
            let mut all = BTreeMap::new();
            for unit in context.plan.reductions().iter().copied() {
                // Frozen parameters have no gradient: their region of the shard is filled with
                // zeros.
                let mut shard = self.shard(model, unit)?;
                shard.resize(context.plan.layout(unit).shard_len(), 0.0);
                let tag = context.tag(Some(unit), Stage::Export, self.step, 0);
                let tag = tag.part(Part { kind: PartKind::Gradients, number: 0 });
                if context.plan.divides_state() {
                    shard = export::gather_slices(context, tag, unit, shard)?;
                }
                export::gather_into(&mut all, context, tag, unit, Arc::new(shard))?;
            }
            export::end_together(context.site("full", self.step))?;
            for (_, frozen) in context.plan.spec().params() {
                if frozen.role == Role::Frozen {
                    all.remove(&frozen.name);
                }
            }
            Ok(all)
        })
    }

    /// Returns the 2-norm of the gradient of each trainable parameter, over all shards, divided,
    /// before clipping; 0 for a parameter without a gradient. Squares are summed in f64, and the
    /// [total](Norms::total) is [`norm`](Self::norm) but for the rounding of f64.
    ///
    /// If the ranks agreed to skip the step, these are norms of the sums without the division.
    /// After an overflow before the all-reduces, each element is that of one replica. Gradients on
    /// a device are copied to the host.
    ///
    /// Collective over the world: one all-reduce of an f64 for each parameter. All ranks get the
    /// same bits.
    ///
    /// # Errors
    /// [`Error::Misuse`] if these are the gradients of another model; [`Error::Comm`] if the
    /// all-reduce fails; [`Error::Device`](Error) if the gradients lie on a device that fails.
    pub fn norms(&self, model: &ShardedModel) -> Result<Norms, Error> {
        let squares = self.summed(model, "norms", 1, add_square)?;
        Ok(trained(model.plan(), &squares, |square| square[0].sqrt() / self.divisor))
    }

    /// Returns `count` sums for each parameter of the model: `add` adds elements of this rank's
    /// gradients to the sums of their parameter.
    fn summed<T: Element>(
        &self,
        model: &ShardedModel,
        operation: &'static str,
        count: usize,
        add: impl Fn(&mut [T], &[f32]),
    ) -> Result<Vec<T>, Error> {
        let context = &model.engine.context;
        control::between_steps(&context.world, self.step, || {
            if self.model != *model.id() {
                let what = "these are the gradients of another model".to_owned();
                return Err(context.misuse(operation, self.step, what));
            }
            let mut sums = vec![T::zeroed(); count * context.parameters()];
            let pieces = counted_pieces(context);
            for unit in context.plan.reductions().iter().copied() {
                let elements = self.sums_on_host(context.site(operation, self.step), unit)?;
                for (number, range) in within(&pieces[unit.index()], elements.len()) {
                    add(&mut sums[count * number..][..count], &elements[range]);
                }
            }
            over_ranks(context, self.step, Some(PartKind::Gradients), Reduction::Sum, sums)
        })
    }

    /// Returns a histogram of the gradient of each trainable parameter, over all shards, divided,
    /// before clipping. Gradients on a device are copied to the host.
    ///
    /// Collective over the world: one all-reduce of 51 u64 for each parameter.
    ///
    /// # Errors
    /// As [`norms`](Self::norms).
    pub fn histograms(&self, model: &ShardedModel) -> Result<Histograms, Error> {
        #[expect(clippy::cast_possible_truncation, reason = "a gradient is f32")]
        let divide = |sum: &f32| (f64::from(*sum) / self.divisor) as f32;
        let count = |counts: &mut [u64], sums: &[f32]| count(counts, sums.iter().map(divide));
        Ok(trained(model.plan(), &self.summed(model, "histograms", COUNTS, count)?, Histogram::of))
    }

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
    /// # fn step(
    /// #     model: &mut ShardedModel,
    /// #     adamw: &mut AdamW,
    /// #     gradients: Gradients,
    /// # ) -> Result<(), hsdp::Error> {
    /// let is_head = |param: &Param| param.name.starts_with("head.");
    /// let (gradients, norm) = gradients.clip_norm(model, is_head, Norm::Infinity, 0.1)?;
    /// adamw.step(model, gradients.clip_value(model, |_| true, 0.5)?)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Collective over the world: one all-reduce of an f64, and two unless the norm is that
    /// of infinity. All ranks get the same bits. Sums are in f64, so their last bits depend on the
    /// mesh; the norm of infinity is the same on every mesh. Gradients on a device are
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
        let mut chosen = vec![false; context.parameters()];
        let mut names = Vec::new();
        let mut trained = 0;
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
    /// world.
    fn norm_of(&self, context: &Context, chosen: &Chosen, norm: Norm) -> Result<f64, Error> {
        let reduced = |by: Reduction, own: f64| {
            let part = Some(PartKind::Gradients);
            Ok::<f64, Error>(over_ranks(context, self.step, part, by, vec![own])?[0])
        };
        let pieces = counted_pieces(context);
        let fold = |start, fold: &dyn Fn(f64, f64) -> f64| {
            self.fold(context, &pieces, chosen, start, fold)
        };
        let largest = reduced(Reduction::Max, fold(0.0, &f64::max)?)?;
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
        let sum = reduced(Reduction::Sum, fold(0.0, &add)?)?;
        Ok(largest * sum.powf(power.recip()))
    }

    /// Folds the magnitudes of the chosen elements that this rank counts, as they are clipped so
    /// far.
    fn fold(
        &self,
        context: &Context,
        pieces: &[Vec<CountedPiece>],
        chosen: &Chosen,
        start: f64,
        fold: impl Fn(f64, f64) -> f64,
    ) -> Result<f64, Error> {
        let mut folded = start;
        for unit in context.plan.reductions().iter().copied() {
            let elements = self.sums_on_host(context.site("clipping", self.step), unit)?;
            for (number, range) in within(&pieces[unit.index()], elements.len()) {
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
