//! Optimizers whose parameters have options by group, and that keep state on shards.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::ops::Range;

use hsdp_checkpoint::OptimizerHead;
use hsdp_kernels::cuda::CudaError;
use hsdp_sharding::{ModelSpec, Param, ParamId};

use crate::error::Error;
use crate::model::ShardedModel;
use crate::optimizer::groups::Groups;
use crate::optimizer::interface::Optimizer;
use crate::optimizer::method::{Earlier, Method, Updates};
use crate::optimizer::options::OptimizerOptions;
use crate::optimizer::run::{DeviceRun, Run};
use crate::optimizer::updating::Updating;
use crate::persist::checkpointed::{Checkpointed, Expected, StateTensor};
use crate::persist::problem::Problem;
use crate::persist::saved::SavedState;
use crate::state::context::ModelId;

/// An optimizer for this rank's shards, whose parameters may have options by group.
///
/// The first update, or a load from a checkpoint, makes the state, of the parameters that the optimizer updates and of no others.
#[derive(Debug)]
pub struct Grouped<O: OptimizerOptions> {
    model: ModelId,
    method: &'static dyn Method<O>,
    groups: Groups<O>,
    state: Option<Box<dyn Updates<O>>>,
}

impl<O: OptimizerOptions> Grouped<O> {
    /// An optimizer without groups, before its first update.
    pub(super) fn of(model: &ShardedModel, method: &'static dyn Method<O>, options: O) -> Self {
        let groups = Groups::none(model, (method.kind(), options));
        Self { model: model.id().clone(), method, groups, state: None }
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

    /// The groups and the state, after `check`.
    fn parts(&mut self) -> (&Groups<O>, &mut dyn Updates<O>) {
        (&self.groups, self.state.as_deref_mut().expect("`check` has made it"))
    }

    /// Whether there is state of the parameters that are updated. An optimizer that keeps none may
    /// update others than before.
    fn fits(&self, updating: &Updating<'_>) -> Result<bool, Error> {
        let Some(state) = &self.state else { return Ok(false) };
        match state.covered().check(self.method.kind(), updating) {
            Err(_) if self.method.kinds(&self.groups.options).is_empty() => Ok(false),
            checked => checked,
        }
    }

    /// Returns the parameters whose state a checkpoint has, or whose number of updates if there is
    /// no state.
    fn covered_in(&self, saved: &SavedState<'_>, options: &O) -> Vec<ParamId> {
        match self.method.kinds(options) {
            [] if self.method.traits().counts => saved.counted_without_state(),
            kinds => saved.parameters_with(kinds),
        }
    }

    /// Makes the state of the parameters that are updated: zeros, or the earlier state where there
    /// is any.
    fn make_state(&mut self, updating: &Updating<'_>) -> Result<(), Error> {
        let has = &|id| updating.has(id);
        let mut state = self.method.zeros(&self.groups, updating.site(), has)?;
        if let Some(earlier) = &self.state {
            state.covered_mut().take_over(earlier.covered());
            let earlier = Earlier { context: updating.context, kept: &**earlier };
            let read = state.read(updating.context, &earlier);
            read.map_err(|problem| updating.misuse(problem.into_text()))?;
        }
        self.state = Some(state);
        Ok(())
    }
}

impl<O: OptimizerOptions> Optimizer for Grouped<O> {
    fn is_collective(&self) -> bool {
        self.method.traits().is_collective
    }

    fn kind(&self) -> Option<&'static str> {
        Some(self.method.kind())
    }

    fn check(&mut self, updating: &Updating<'_>, lines: &mut String) -> Result<(), Error> {
        updating.check_owner(&self.model)?;
        self.groups.check()?;
        if updating.is_on_device() && !self.method.traits().on_device {
            let what = format!(
                "{} cannot update a model on a device: place it on the host",
                self.method.kind()
            );
            return Err(updating.misuse(what));
        }
        self.method.check(&self.groups)?;
        write!(lines, "{}", self.groups.lines()).expect("options have texts");
        if !self.fits(updating)? {
            self.make_state(updating)?;
        }
        Ok(())
    }

    fn prepare(&mut self, updating: &Updating<'_>) -> Result<(), Error> {
        let (groups, state) = self.parts();
        state.prepare(groups, updating)
    }

    fn begin(&mut self, updating: &Updating<'_>) {
        let (_, state) = self.parts();
        state.covered_mut().begin(updating);
        state.begin(updating);
    }

    fn update(&mut self, run: Run<'_>) {
        let (groups, state) = self.parts();
        state.update(groups, run);
    }

    fn update_on_device(&mut self, run: DeviceRun<'_>) -> Result<(), CudaError> {
        let (groups, state) = self.parts();
        state.update_on_device(groups, run)
    }

    fn set_learning_rate(&mut self, rate: f64) {
        self.groups.set_learning_rate(rate);
    }
}

impl<O: OptimizerOptions> Checkpointed for Grouped<O> {
    fn is_of(&self, model: &ModelId) -> bool {
        self.model == *model
    }

    fn head(&self, spec: &ModelSpec) -> OptimizerHead {
        let counted = self.state.iter().filter(|_| self.method.traits().counts);
        let updates = counted.flat_map(|state| state.covered().counts(spec)).collect();
        let (kind, options) = (self.method.kind().to_owned(), self.groups.json());
        OptimizerHead {
            kind,
            options,
            made_with: Some(self.groups.made_with()),
            updates,
            is_open: self.state.iter().any(|state| state.covered().is_open()),
        }
    }

    fn kinds(&self) -> Vec<&'static str> {
        self.method.kinds(&self.groups.options).to_vec()
    }

    fn tensors(&self) -> Vec<StateTensor> {
        let (options, spec) = (&self.groups.options, self.groups.spec());
        let parameters = self.state.iter().flat_map(|state| state.covered().parameters());
        parameters.flat_map(|id| self.method.tensors(options, id, &spec[id])).collect()
    }

    fn expected(&self, saved: &SavedState<'_>) -> Expected {
        let groups = self.groups.following(saved.options).unwrap_or_else(|_| self.groups.clone());
        let parameters = self.covered_in(saved, &groups.options);
        let of = |id: &ParamId| self.method.tensors(&groups.options, *id, saved.parameter(*id));
        let tensors = parameters.iter().flat_map(of).collect();
        Expected {
            tensors,
            counted: if self.method.traits().counts { parameters } else { Vec::new() },
        }
    }

    fn state<'a>(
        &'a self,
        model: &ShardedModel,
        of: (&str, ParamId),
        range: Range<usize>,
    ) -> Result<Option<Cow<'a, [f32]>>, Error> {
        match &self.state {
            Some(state) => state.elements(&model.engine.context, of, range),
            None => Ok(None),
        }
    }

    fn copy_state(
        &self,
        model: &ShardedModel,
        of: (&str, ParamId),
        into: (usize, &mut [f32]),
    ) -> Result<bool, Error> {
        match &self.state {
            Some(state) => state.copy_elements(&model.engine.context, of, into),
            None => Ok(false),
        }
    }

    fn restored(&self, model: &ShardedModel, saved: &SavedState<'_>) -> Result<Self, Problem> {
        let groups = self.groups.following(saved.options).map_err(Problem::lasting)?;
        let has: BTreeSet<ParamId> = self.covered_in(saved, &groups.options).into_iter().collect();
        let context = &model.engine.context;
        let read = || {
            let site = context.site("loading", model.committed_steps());
            let mut state = self.method.zeros(&groups, site, &|id| has.contains(&id))?;
            state.covered_mut().read(saved);
            state.read(context, saved)?;
            Ok::<_, Problem>(state)
        };
        let state = (!has.is_empty()).then(read).transpose()?;
        Ok(Self { model: self.model.clone(), method: self.method, groups, state })
    }
}
