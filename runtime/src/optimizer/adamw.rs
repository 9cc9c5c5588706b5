//! AdamW, as PyTorch computes it.

use std::borrow::Cow;
use std::fmt::{self, Display};

use hsdp_kernels::AdamWStep;
use hsdp_sharding::{Param, UnitId};
use serde_json::{Value, json};

use crate::checkpoint::copy_part;
use crate::checkpoint::{Checkpointed, OptimizerState};
use crate::error::Error;
use crate::gradients::{Gradients, Verdict};
use crate::model::{ModelId, ShardedModel};
use crate::optimizer::device::{DeviceRun, DeviceState, pieces_of_step, reborrow};
use crate::optimizer::groups::{Groups, Options};
use crate::optimizer::{
    Allowed, Optimizer, Update, check_options, count_per_parameter, state_like_shards, take,
};

/// The parameters of AdamW. The defaults are PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWOptions {
    /// The learning rate.
    pub learning_rate: f64,
    /// The decay of the first and of the second moment.
    pub betas: (f64, f64),
    /// Added to the root of the corrected second moment.
    pub eps: f64,
    /// Before the update, the parameters shrink by learning rate x weight decay.
    pub weight_decay: f64,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        Self { learning_rate: 1e-3, betas: (0.9, 0.999), eps: 1e-8, weight_decay: 1e-2 }
    }
}

impl Options for AdamWOptions {
    const KIND: &'static str = "adamw";

    fn learning_rate(&mut self) -> &mut f64 {
        &mut self.learning_rate
    }

    fn check(&self, of: &dyn Display) -> Result<(), Error> {
        let Self { learning_rate, betas, eps, weight_decay } = *self;
        let options = [
            ("learning_rate", learning_rate, Allowed::NotNegative),
            ("betas.0", betas.0, Allowed::Fraction),
            ("betas.1", betas.1, Allowed::Fraction),
            ("eps", eps, Allowed::NotNegative),
            ("weight_decay", weight_decay, Allowed::NotNegative),
        ];
        check_options(of, options)
    }

    fn write(&self, f: &mut fmt::Formatter<'_>, of: &dyn Display) -> fmt::Result {
        let Self { learning_rate, betas, eps, weight_decay } = *self;
        writeln!(f, "{of} learning_rate {learning_rate:?}")?;
        writeln!(f, "{of} betas {betas:?}")?;
        writeln!(f, "{of} eps {eps:?}")?;
        writeln!(f, "{of} weight_decay {weight_decay:?}")
    }

    fn json(&self) -> Value {
        let Self { learning_rate, betas, eps, weight_decay } = *self;
        json!({ "learning_rate": learning_rate, "betas": betas, "eps": eps, "weight_decay": weight_decay })
    }
}

impl AdamWOptions {
    /// An update, the `step`-th of its parameter.
    fn of_step(&self, step: u64, clip: f32) -> AdamWStep {
        AdamWStep {
            learning_rate: self.learning_rate,
            beta1: self.betas.0,
            beta2: self.betas.1,
            epsilon: self.eps,
            weight_decay: self.weight_decay,
            step,
            clip,
        }
    }
}

/// AdamW (Loshchilov and Hutter, arXiv 1711.05101) on this rank's shards, with state in f32.
#[derive(Debug)]
pub struct AdamW {
    model: ModelId,
    groups: Groups<AdamWOptions>,
    first_moments: Vec<Vec<f32>>,
    second_moments: Vec<Vec<f32>>,
    /// The two moments of a model on a device.
    on_device: [DeviceState; 2],
    /// The number of updates of each parameter. A step in which a parameter has no gradient is not one of them.
    updates: Vec<Vec<u64>>,
}

impl AdamW {
    /// Makes the state for this rank's shards of `model`: two f32 for each trainable element.
    ///
    /// # Panics
    /// If there is not enough memory.
    #[must_use]
    pub fn new(model: &ShardedModel, options: AdamWOptions) -> Self {
        Self {
            model: model.id().clone(),
            groups: Groups::none(model, options),
            first_moments: state_like_shards(model),
            second_moments: state_like_shards(model),
            on_device: Default::default(),
            updates: count_per_parameter(model),
        }
    }

    /// Gives a group of parameters options of its own: each trainable parameter that `has` accepts, and that is in no earlier group.
    /// `change` gets the options of the optimizer, and returns those of the group.
    ///
    /// The ratio of the group's learning rate to that of the optimizer stays, whatever
    /// [`set_learning_rate`](Optimizer::set_learning_rate) sets. If the optimizer's rate is 0 there is no ratio: a group that changes
    /// the rate is then refused by the first step.
    ///
    /// All ranks make the same groups, and compare them with the other options of an update.
    ///
    /// ```
    /// use hsdp::prelude::*;
    /// # fn groups(model: &ShardedModel) -> AdamW {
    /// // Weight decay for matrices only.
    /// let options = AdamWOptions { weight_decay: 0.0, ..Default::default() };
    /// AdamW::new(model, options)
    ///     .group(|param| param.shape.len() >= 2, |it| AdamWOptions { weight_decay: 0.1, ..it })
    /// # }
    /// ```
    #[must_use]
    pub fn group(
        self,
        has: impl Fn(&Param) -> bool,
        change: impl FnOnce(AdamWOptions) -> AdamWOptions,
    ) -> Self {
        Self { groups: self.groups.with(has, change), ..self }
    }

    fn step_on_device(
        &mut self,
        model: &mut ShardedModel,
        gradients: Gradients,
    ) -> Result<Update, Error> {
        let Self { groups, on_device: [first, second], updates, .. } = self;
        model.update_on_device_as(groups.lines(), gradients, |run| {
            let DeviceRun { unit, stream, mut update, pieces, clip } = run;
            let of_unit = (unit, update.gradient.len());
            let (first, second) = (first.of(stream, of_unit)?, second.of(stream, of_unit)?);
            for (options, has) in groups.each() {
                let pieces = pieces.iter().filter(|piece| has(unit, piece.param));
                let pieces = pieces_of_step(pieces, |piece| updates[unit.index()][piece.param]);
                if !pieces.is_empty() {
                    let (update, step) = (reborrow(&mut update), options.of_step(1, clip));
                    stream.adamw(update, &pieces, &step, (&mut *first, &mut *second))?;
                }
            }
            Ok(())
        })
    }

    /// Counts an update for each parameter that has a gradient.
    fn count_updates(&mut self, gradients: &Gradients) {
        let units = self.updates.iter_mut().zip(&gradients.grad_shards.present);
        for (updates, present) in units.flat_map(|(unit, present)| unit.iter_mut().zip(present)) {
            *updates += u64::from(*present);
        }
    }
}

impl Optimizer for AdamW {
    fn step(
        &mut self,
        model: &mut ShardedModel,
        mut gradients: Gradients,
    ) -> Result<Update, Error> {
        take(&mut gradients, model, &self.model)?;
        self.groups.check()?;
        self.on_device.iter_mut().try_for_each(|state| state.make(model, gradients.step()))?;
        if *gradients.verdict() == Verdict::Apply {
            self.count_updates(&gradients);
        }
        if model.updates_on_device() {
            return self.step_on_device(model, gradients);
        }
        let Self { groups, first_moments, second_moments, updates, .. } = self;
        model.update_as(groups.lines(), gradients, |run| {
            let unit = run.unit.index();
            let range = run.piece.shard_range();
            let options = groups.of(run.unit, run.piece.param);
            let step = options.of_step(updates[unit][run.piece.param], run.clip);
            let (first, second) =
                (&mut first_moments[unit][range.clone()], &mut second_moments[unit][range]);
            hsdp_kernels::adamw(&step, run.parameters, run.gradient, first, second);
        })
    }

    fn set_learning_rate(&mut self, rate: f64) {
        self.groups.set_learning_rate(rate);
    }
}

impl Checkpointed for AdamW {
    const KIND: &'static str = "adamw";

    fn model(&self) -> &ModelId {
        &self.model
    }

    fn state_kinds(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn options(&self) -> Value {
        self.groups.json()
    }

    fn updates(&self, unit: UnitId) -> Vec<u64> {
        self.updates[unit.index()].clone()
    }

    fn state<'a>(
        &'a self,
        model: &ShardedModel,
        (kind, unit): (&str, UnitId),
    ) -> Result<Cow<'a, [f32]>, Error> {
        let second = usize::from(kind == "exp_avg_sq");
        if model.updates_on_device() {
            return self.on_device[second].to_host(model, unit).map(Cow::Owned);
        }
        Ok(Cow::Borrowed(&[&self.first_moments, &self.second_moments][second][unit.index()]))
    }

    fn copy_state(
        &self,
        model: &ShardedModel,
        (kind, unit): (&str, UnitId),
        (from, into): (usize, &mut [f32]),
    ) -> Result<(), Error> {
        if model.updates_on_device() {
            let second = usize::from(kind == "exp_avg_sq");
            return self.on_device[second].copy_to(model, (unit, from), into);
        }
        copy_part(&self.state(model, (kind, unit))?, (from, into));
        Ok(())
    }

    fn restored(&self, model: &ShardedModel, state: OptimizerState) -> Result<Self, Error> {
        let OptimizerState { elements, updates } = state;
        let [first_moments, second_moments]: [Vec<Vec<f32>>; 2] =
            elements.try_into().unwrap_or_default();
        let restored = Self {
            model: model.id().clone(),
            groups: self.groups.clone(),
            first_moments,
            second_moments,
            on_device: Default::default(),
            updates,
        };
        if model.updates_on_device() {
            let moments = [&restored.first_moments, &restored.second_moments];
            let [first, second] = moments.map(|it| DeviceState::from_host(model, it));
            let nothing = || vec![Vec::new(); restored.updates.len()];
            let (first_moments, second_moments) = (nothing(), nothing());
            return Ok(Self {
                first_moments,
                second_moments,
                on_device: [first?, second?],
                ..restored
            });
        }
        Ok(restored)
    }
}
