//! Optimizers that update each element from its gradient and its own state, as a rule says.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::ops::Range;

use hsdp_checkpoint::OptimizerHead;
use hsdp_kernels::cuda::{CudaError, PieceOfStep};
use hsdp_sharding::{ModelSpec, Param, ParamId, Piece, UnitId};

use crate::checkpoint::{Checkpointed, Expected, Problem, SavedState, StateTensor};
use crate::error::Error;
use crate::model::{ModelId, ShardedModel};
use crate::optimizer::device::reborrow;
use crate::optimizer::groups::Groups;
use crate::optimizer::held::{Held, tensors_of};
use crate::optimizer::rule::{Rule, RunState, UnitRun, UnitState};
use crate::optimizer::{DeviceRun, Optimizer, Run, Updating};

/// An optimizer that updates each element of this rank's shards from its gradient and its own state, which is f32.
///
/// The first update, or a load from a checkpoint, makes the state, of the parameters that the optimizer updates and of no others.
#[derive(Debug)]
pub struct Elementwise<O: Rule> {
    model: ModelId,
    groups: Groups<O>,
    held: Option<Held>,
}

impl<O: Rule> Elementwise<O> {
    /// An optimizer for this rank's shards of `model`.
    #[must_use]
    pub fn new(model: &ShardedModel, options: O) -> Self {
        Self { model: model.id().clone(), groups: Groups::none(model, options), held: None }
    }

    /// Gives a group of parameters options of its own: each trainable parameter that `has` accepts, and that is in no earlier group.
    /// `change` gets the options of the optimizer, and returns those of the group.
    ///
    /// The ratio of the group's learning rate to that of the optimizer stays, whatever
    /// [`set_learning_rate`](Optimizer::set_learning_rate) sets. If the optimizer's rate is 0 there is no ratio: a group that changes
    /// the rate is then refused by the first step.
    ///
    /// All ranks make the same groups, and compare them with the other options of an update. A group has the state that the options of
    /// the optimizer need: SGD keeps velocities only if the optimizer has momentum.
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
    pub fn group(self, has: impl Fn(&Param) -> bool, change: impl FnOnce(O) -> O) -> Self {
        Self { groups: self.groups.with(has, change), ..self }
    }

    /// Sets the learning rate of a group for the next steps, by its index in the order in which groups were made. From then on
    /// [`set_learning_rate`](Optimizer::set_learning_rate) leaves it as it is: the group has a schedule of its own.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn set_learning_rate_of(&mut self, group: usize, rate: f64) {
        self.groups.set_learning_rate_of(group, rate);
    }

    fn check_groups(&self) -> Result<(), Error> {
        self.groups.check()?;
        let (kind, own) = (O::KIND, self.groups.options.kinds());
        match self.groups.of_groups().position(|options| options.kinds().len() > own.len()) {
            None => Ok(()),
            Some(group) => {
                let what = format!(
                    "{kind} group {group} needs state, and the options of the optimizer itself keep none"
                );
                Err(Error::Options { what })
            }
        }
    }
}

impl<O: Rule> Optimizer for Elementwise<O> {
    fn check(&mut self, updating: &Updating<'_>, lines: &mut String) -> Result<(), Error> {
        updating.check_owner(&self.model)?;
        self.check_groups()?;
        write!(lines, "{}", self.groups.lines()).expect("options have texts");
        if updating.is_on_device() && !O::ON_DEVICE {
            let what =
                format!("{} cannot update a model on a device: place it on the host", O::KIND);
            return Err(updating.misuse(what));
        }
        Held::of(&mut self.held, updating, (O::KIND, self.groups.options.kinds()))
    }

    fn begin(&mut self, updating: &Updating<'_>) {
        self.held.as_mut().expect("`check` has made it").covered.begin(updating);
    }

    fn update(&mut self, run: Run<'_>) {
        let held = self.held.as_mut().expect("`check` has made it");
        let (unit, range) = (run.unit, held.place(run.unit, &run.piece));
        let number = held.covered.count(ParamId { unit, index: run.piece.param });
        let options = self.groups.of(unit, run.piece.param);
        options.update(number, run, RunState { states: &mut held.states, unit, range });
    }

    fn update_on_device(&mut self, run: DeviceRun<'_>) -> Result<(), CudaError> {
        let DeviceRun { unit, stream, mut update, pieces, clip } = run;
        let held = self.held.as_mut().expect("`check` has made it");
        for (options, has) in self.groups.each() {
            let pieces = pieces.iter().filter(|piece| has(unit, piece.param));
            let pieces: Vec<_> = pieces.map(|piece| piece_of_step(held, unit, piece)).collect();
            if !pieces.is_empty() {
                let run = UnitRun { stream, update: reborrow(&mut update), clip };
                let state = UnitState { states: &mut held.states, unit };
                options.update_on_device(run, &pieces, state)?;
            }
        }
        Ok(())
    }

    fn set_learning_rate(&mut self, rate: f64) {
        self.groups.set_learning_rate(rate);
    }
}

/// A piece for a kernel, with the number of its update.
fn piece_of_step(held: &Held, unit: UnitId, piece: &Piece) -> PieceOfStep {
    let step = held.covered.count(ParamId { unit, index: piece.param });
    let state = held.place(unit, piece).start;
    PieceOfStep { range: piece.shard_range(), state, step }
}

impl<O: Rule> Checkpointed for Elementwise<O> {
    fn is_of(&self, model: &ModelId) -> bool {
        self.model == *model
    }

    fn head(&self, spec: &ModelSpec) -> OptimizerHead {
        let held = self.held.iter().filter(|_| O::COUNTS);
        let updates = held.flat_map(|held| held.covered.counts(spec)).collect();
        OptimizerHead { kind: O::KIND.to_owned(), options: self.groups.json(), updates }
    }

    fn tensors(&self) -> Vec<StateTensor> {
        self.held.as_ref().map_or_else(Vec::new, Held::tensors)
    }

    fn expected(&self, saved: &SavedState<'_>) -> Expected {
        let kinds = self.groups.options.kinds();
        let params = saved.parameters_with(kinds);
        let tensors = tensors_of(kinds, params.iter().copied());
        Expected { tensors, counted: if O::COUNTS { params } else { Vec::new() } }
    }

    fn state<'a>(
        &'a self,
        model: &ShardedModel,
        of: (&str, ParamId),
        range: Range<usize>,
    ) -> Result<Option<Cow<'a, [f32]>>, Error> {
        let Some(held) = &self.held else { return Ok(None) };
        held.state(&model.engine.fabric, of, range)
    }

    fn copy_state(
        &self,
        model: &ShardedModel,
        of: (&str, ParamId),
        into: (usize, &mut [f32]),
    ) -> Result<bool, Error> {
        let Some(held) = &self.held else { return Ok(false) };
        held.copy_state(&model.engine.fabric, of, into)
    }

    fn restored(&self, model: &ShardedModel, saved: &SavedState<'_>) -> Result<Self, Problem> {
        let of = (self.groups.options.kinds(), model.committed_steps());
        let held = Held::restored(&model.engine.fabric, of, saved)?;
        Ok(Self { model: self.model.clone(), groups: self.groups.clone(), held })
    }
}
