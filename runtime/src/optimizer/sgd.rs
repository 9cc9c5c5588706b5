//! SGD, with momentum if wanted, as PyTorch computes it.

use std::borrow::Cow;
use std::fmt::{self, Display};

use hsdp_kernels::{MomentumKind, SgdStep};
use hsdp_sharding::{Param, UnitId};
use serde_json::{Value, json};

use crate::checkpoint::copy_part;
use crate::checkpoint::{Checkpointed, OptimizerState};
use crate::error::Error;
use crate::gradients::Gradients;
use crate::model::{ModelId, ShardedModel};
use crate::optimizer::device::{DeviceRun, DeviceState, pieces_of_step, reborrow};
use crate::optimizer::groups::{Groups, Options};
use crate::optimizer::{Allowed, Optimizer, Update, check_options, state_like_shards, take};

/// Whether and how past gradients enter an update.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Momentum {
    /// Not at all; no state is kept.
    #[default]
    Off,
    /// The update follows a velocity, of which each step keeps this fraction.
    Classic(f64),
    /// Likewise, looking one step ahead.
    Nesterov(f64),
}

/// The parameters of SGD.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdOptions {
    /// The learning rate.
    pub learning_rate: f64,
    /// Whether and how past gradients enter.
    pub momentum: Momentum,
    /// The fraction of a parameter that is added to its gradient.
    pub weight_decay: f64,
}

impl Default for SgdOptions {
    fn default() -> Self {
        Self { learning_rate: 1e-2, momentum: Momentum::Off, weight_decay: 0.0 }
    }
}

impl Options for SgdOptions {
    const KIND: &'static str = "sgd";

    fn learning_rate(&mut self) -> &mut f64 {
        &mut self.learning_rate
    }

    fn check(&self, of: &dyn Display) -> Result<(), Error> {
        let Self { learning_rate, momentum, weight_decay } = *self;
        let momentum = match momentum {
            Momentum::Off => 0.0,
            Momentum::Classic(momentum) | Momentum::Nesterov(momentum) => momentum,
        };
        let options = [
            ("learning_rate", learning_rate, Allowed::NotNegative),
            ("momentum", momentum, Allowed::NotNegative),
            ("weight_decay", weight_decay, Allowed::NotNegative),
        ];
        check_options(of, options)
    }

    fn write(&self, f: &mut fmt::Formatter<'_>, of: &dyn Display) -> fmt::Result {
        let Self { learning_rate, momentum, weight_decay } = *self;
        writeln!(f, "{of} learning_rate {learning_rate:?}")?;
        writeln!(f, "{of} momentum {momentum:?}")?;
        writeln!(f, "{of} weight_decay {weight_decay:?}")
    }

    fn json(&self) -> Value {
        let Self { learning_rate, momentum, weight_decay } = *self;
        let (momentum, nesterov) = match momentum {
            Momentum::Off => (0.0, false),
            Momentum::Classic(momentum) => (momentum, false),
            Momentum::Nesterov(momentum) => (momentum, true),
        };
        json!({
            "learning_rate": learning_rate, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay,
        })
    }
}

impl SgdOptions {
    /// An update.
    fn of_step(&self, clip: f32) -> SgdStep {
        let (momentum, kind) = match self.momentum {
            Momentum::Off => (0.0, MomentumKind::Classic),
            Momentum::Classic(momentum) => (momentum, MomentumKind::Classic),
            Momentum::Nesterov(momentum) => (momentum, MomentumKind::Nesterov),
        };
        let Self { learning_rate, weight_decay, .. } = *self;
        SgdStep { learning_rate, momentum, kind, weight_decay, clip }
    }
}

/// SGD on this rank's shards, with state in f32.
#[derive(Debug)]
pub struct Sgd {
    model: ModelId,
    groups: Groups<SgdOptions>,
    /// One f32 for each trainable element; nothing without momentum.
    velocities: Option<Vec<Vec<f32>>>,
    /// The same for a model on a device.
    on_device: DeviceState,
}

impl Sgd {
    /// Makes the state for this rank's shards of `model`.
    ///
    /// # Panics
    /// If there is not enough memory.
    #[must_use]
    pub fn new(model: &ShardedModel, options: SgdOptions) -> Self {
        let velocities = (options.momentum != Momentum::Off).then(|| state_like_shards(model));
        Self {
            model: model.id().clone(),
            groups: Groups::none(model, options),
            velocities,
            on_device: DeviceState::default(),
        }
    }

    /// Gives a group of parameters options of its own, as [`AdamW::group`](crate::AdamW::group) does. A group has momentum only if the
    /// optimizer has some, too.
    #[must_use]
    pub fn group(
        self,
        has: impl Fn(&Param) -> bool,
        change: impl FnOnce(SgdOptions) -> SgdOptions,
    ) -> Self {
        Self { groups: self.groups.with(has, change), ..self }
    }

    fn has_velocities(&self) -> bool {
        self.groups.options.momentum != Momentum::Off
    }

    fn check(&self) -> Result<(), Error> {
        self.groups.check()?;
        let has_momentum = |options: &SgdOptions| options.momentum != Momentum::Off;
        if self.has_velocities() || !self.groups.of_groups().any(has_momentum) {
            return Ok(());
        }
        let what = "sgd: a group has momentum, and the optimizer has none: no velocities were made"
            .to_owned();
        Err(Error::Options { what })
    }

    fn step_on_device(
        &mut self,
        model: &mut ShardedModel,
        gradients: Gradients,
    ) -> Result<Update, Error> {
        let has_velocities = self.has_velocities();
        let Self { groups, on_device, .. } = self;
        if has_velocities {
            on_device.make(model, gradients.step())?;
        }
        model.update_on_device_as(groups.lines(), gradients, |run| {
            let DeviceRun { unit, stream, mut update, pieces, clip } = run;
            let of_unit = (unit, update.gradient.len());
            let mut velocity = has_velocities.then(|| on_device.of(stream, of_unit)).transpose()?;
            for (options, has) in groups.each() {
                let pieces = pieces.iter().filter(|piece| has(unit, piece.param));
                let pieces = pieces_of_step(pieces, |_| 1);
                if !pieces.is_empty() {
                    let (update, step) = (reborrow(&mut update), options.of_step(clip));
                    stream.sgd(update, &pieces, &step, velocity.as_deref_mut())?;
                }
            }
            Ok(())
        })
    }
}

impl Optimizer for Sgd {
    fn step(
        &mut self,
        model: &mut ShardedModel,
        mut gradients: Gradients,
    ) -> Result<Update, Error> {
        take(&mut gradients, model, &self.model)?;
        self.check()?;
        if model.updates_on_device() {
            return self.step_on_device(model, gradients);
        }
        let Self { groups, velocities, .. } = self;
        model.update_as(groups.lines(), gradients, |run| {
            let options = groups.of(run.unit, run.piece.param);
            let range = run.piece.shard_range();
            let velocity = velocities.as_mut().map(|all| &mut all[run.unit.index()][range]);
            hsdp_kernels::sgd(&options.of_step(run.clip), run.parameters, run.gradient, velocity);
        })
    }

    fn set_learning_rate(&mut self, rate: f64) {
        self.groups.set_learning_rate(rate);
    }
}

impl Checkpointed for Sgd {
    const KIND: &'static str = "sgd";

    fn model(&self) -> &ModelId {
        &self.model
    }

    fn state_kinds(&self) -> &'static [&'static str] {
        if self.has_velocities() { &["momentum_buffer"] } else { &[] }
    }

    fn options(&self) -> Value {
        self.groups.json()
    }

    fn updates(&self, _: UnitId) -> Vec<u64> {
        Vec::new()
    }

    fn state<'a>(
        &'a self,
        model: &ShardedModel,
        (_, unit): (&str, UnitId),
    ) -> Result<Cow<'a, [f32]>, Error> {
        if model.updates_on_device() {
            return self.on_device.to_host(model, unit).map(Cow::Owned);
        }
        Ok(Cow::Borrowed(self.velocities.as_ref().map_or(&[], |all| &all[unit.index()])))
    }

    fn copy_state(
        &self,
        model: &ShardedModel,
        (kind, unit): (&str, UnitId),
        (from, into): (usize, &mut [f32]),
    ) -> Result<(), Error> {
        if model.updates_on_device() {
            return self.on_device.copy_to(model, (unit, from), into);
        }
        copy_part(&self.state(model, (kind, unit))?, (from, into));
        Ok(())
    }

    fn restored(&self, model: &ShardedModel, state: OptimizerState) -> Result<Self, Error> {
        let velocities = state.elements.into_iter().next();
        if model.updates_on_device() {
            let on_device =
                velocities.map(|all| DeviceState::from_host(model, &all)).transpose()?;
            let on_device = on_device.unwrap_or_default();
            let groups = self.groups.clone();
            return Ok(Self { groups, on_device, ..Self::new(model, self.groups.options) });
        }
        Ok(Self {
            model: model.id().clone(),
            groups: self.groups.clone(),
            velocities,
            on_device: DeviceState::default(),
        })
    }
}
