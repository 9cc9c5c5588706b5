//! Optimizers whose parameters have options by group, and that keep state on shards.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::ops::Range;

use hsdp_checkpoint::OptimizerHead;
use hsdp_kernels::EIGHT_BIT_BLOCK;
use hsdp_kernels::cuda::CudaError;
use hsdp_sharding::{Granularity, ModelSpec, Param, ParamId, Piece};

use crate::error::Error;
use crate::model::ShardedModel;
use crate::optimizer::exchange::MatrixExchange;
use crate::optimizer::groups::GroupedOptions;
use crate::optimizer::interface::{DeviceRun, Optimizer, Run, Updating, reborrow};
use crate::optimizer::rule::{Rule, RuleExchange, RunState};
use crate::optimizer::state::{
    Covered, EIGHT_BIT_KINDS, KindOfState, OptimizerState, StagedUpdate, StatePlaces,
    eight_bit_tensors,
};
use crate::persist::checkpointed::{Checkpointed, Expected, StateTensor};
use crate::persist::problem::Problem;
use crate::persist::saved::SavedState;
use crate::state::context::{Context, ErrorSite, ModelId};

/// An optimizer for this rank's shards by a rule, whose parameters may have options by group.
///
/// The first update, or a load from a checkpoint, makes the state, of the parameters that the
/// optimizer updates and of no others.
#[derive(Debug)]
pub struct Grouped<O: Rule> {
    model: ModelId,
    form: StateForm,
    groups: GroupedOptions<O>,
    state: Option<OptimizerState>,
}

/// The form of an optimizer's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StateForm {
    /// The tensors of the rule.
    F32,
    /// Two moments in 8 bits an element.
    EightBit,
}

impl<O: Rule> Grouped<O> {
    /// Makes an optimizer that updates this rank's shards of `model` by a rule, without groups.
    #[must_use]
    pub fn new(model: &ShardedModel, options: O) -> Self {
        Self::with_form(model, O::KIND, StateForm::F32, options)
    }

    pub(super) fn with_form(
        model: &ShardedModel,
        kind: &'static str,
        form: StateForm,
        options: O,
    ) -> Self {
        let groups = GroupedOptions::none(model, kind, options);
        Self { model: model.id().clone(), form, groups, state: None }
    }

    /// Gives a group of parameters options of its own: each trainable parameter that `has` accepts,
    /// and that is in no earlier group. `change` gets the options of the optimizer, and returns
    /// those of the group.
    ///
    /// The ratio of the group's learning rate to that of the optimizer stays, whatever
    /// [`set_learning_rate`](Optimizer::set_learning_rate) sets. If the optimizer's rate is 0 there
    /// is no ratio: a group that changes the rate is then refused by the first step.
    ///
    /// All ranks make the same groups, and compare them with the other options of an update. A
    /// group has the state that the options of the optimizer need: SGD keeps velocities only if the
    /// optimizer has momentum.
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

    /// Sets the learning rate of a group for the next steps, by its index in the order in which
    /// groups were made. From then on [`set_learning_rate`](Optimizer::set_learning_rate) leaves it
    /// as it is: the group has a schedule of its own.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn set_learning_rate_of(&mut self, group: usize, rate: f64) {
        self.groups.set_learning_rate_of(group, rate);
    }

    /// Returns the groups and the state, after `check`.
    fn parts(&mut self) -> (&GroupedOptions<O>, &mut OptimizerState) {
        (&self.groups, self.state.as_mut().expect("`check` has made it"))
    }

    /// Returns the kinds of tensors that a checkpoint has of the state.
    fn kinds_with(&self, options: &O) -> &'static [&'static str] {
        match self.form {
            StateForm::F32 => options.kinds(),
            StateForm::EightBit => EIGHT_BIT_KINDS,
        }
    }

    fn tensors_of(&self, options: &O, id: ParamId, param: &Param) -> Vec<StateTensor> {
        match self.form {
            StateForm::F32 => options.tensors(id, param),
            StateForm::EightBit => eight_bit_tensors(id),
        }
    }

    /// Returns whether there is state of the parameters that are updated. An optimizer that keeps
    /// none may update others than before.
    fn fits(&self, updating: &Updating<'_>) -> Result<bool, Error> {
        let Some(state) = &self.state else { return Ok(false) };
        match state.covered.check(self.groups.kind, updating) {
            Err(_) if self.kinds_with(&self.groups.options).is_empty() => Ok(false),
            checked => checked,
        }
    }

    /// Returns the parameters whose state a checkpoint has, or whose number of updates if there is
    /// no state.
    fn covered_in(&self, saved: &SavedState<'_>, options: &O) -> Vec<ParamId> {
        match self.kinds_with(options) {
            [] if O::COUNTS => saved.counted_without_state(),
            kinds => saved.parameters_with(kinds),
        }
    }

    /// Makes the state of the parameters that `has` selects, before their first update.
    fn zeros(
        &self,
        options: &O,
        site: ErrorSite<'_>,
        has: &dyn Fn(ParamId) -> bool,
    ) -> Result<OptimizerState, Error> {
        let ErrorSite { context, .. } = site;
        if self.form == StateForm::EightBit {
            check_blocks(context, self.groups.kind, has)?;
        }
        let exchange =
            O::WHOLES.map(|wholes| MatrixExchange::of(context, wholes, 1, has)).transpose()?;
        let covered = Covered::of(context, has);
        let spec = context.plan.spec();
        let spread = |kind: &str, id: ParamId| {
            let tensors = covered.has(id).then(|| self.tensors_of(options, id, &spec[id]))?;
            tensors.iter().find(|tensor| tensor.kind == kind).map(|tensor| tensor.spread)
        };
        let mut kinds = Vec::new();
        for (index, kind) in self.kinds_with(options).iter().enumerate() {
            let places = StatePlaces::of(context, |id| spread(kind, id));
            kinds.push(match self.form {
                StateForm::EightBit if index % 2 == 0 => {
                    KindOfState::zero_codes(site, kind, places)?
                }
                _ => KindOfState::zeros(site, kind, places)?,
            });
        }
        let staged = StagedUpdate::default();
        Ok(OptimizerState { covered, kinds, exchange, staged, on_device: None })
    }

    /// Makes the state of the parameters that are updated: zeros, or the earlier state where there
    /// is any.
    fn make_state(&mut self, updating: &Updating<'_>) -> Result<(), Error> {
        let has = &|id| updating.has(id);
        let site = updating.site();
        let mut state = self.zeros(&self.groups.options, site, has)?;
        if let Some(earlier) = &self.state {
            state.covered.take_over(&earlier.covered);
            state.fill(site, |kind, id, start, into| {
                earlier.copy_elements(site, kind, id, start, into).map(drop)
            })?;
        }
        self.state = Some(state);
        Ok(())
    }

    /// Refuses a group that needs state, where the options of the optimizer itself keep none.
    fn check_kinds(&self) -> Result<(), Error> {
        let own = self.groups.options.kinds().len();
        match self.groups.of_groups().position(|options| options.kinds().len() > own) {
            None => Ok(()),
            Some(group) => {
                let what = format!(
                    "{} group {group} needs state, and the options of the optimizer itself keep \
                     none",
                    self.groups.kind
                );
                Err(Error::Options { what })
            }
        }
    }
}

/// Checks that the parameters are cut between blocks, whatever the mesh.
fn check_blocks(context: &Context, kind: &str, has: &dyn Fn(ParamId) -> bool) -> Result<(), Error> {
    let is_cut_within = |param: &Param| match param.granularity {
        Granularity::Blocks(block) => !block.is_multiple_of(EIGHT_BIT_BLOCK),
        Granularity::Element | Granularity::Rows(_) => true,
    };
    let mut params = context.plan.spec().params();
    match params.find(|(id, param)| has(*id) && is_cut_within(param)) {
        None => Ok(()),
        Some((_, param)) => {
            let name = &param.name;
            let what = format!(
                "parameter `{name}`: {kind} keeps state in blocks of {EIGHT_BIT_BLOCK} elements, \
                 and shards are cut within them: declare the parameter with \
                 `blocks({EIGHT_BIT_BLOCK})`"
            );
            Err(Error::Options { what })
        }
    }
}

impl<O: Rule> Optimizer for Grouped<O> {
    fn is_collective(&self) -> bool {
        O::COLLECTIVE
    }

    fn kind(&self) -> Option<&'static str> {
        Some(self.groups.kind)
    }

    fn check(&mut self, updating: &Updating<'_>, lines: &mut String) -> Result<(), Error> {
        updating.check_owner(&self.model)?;
        self.groups.check()?;
        if updating.is_on_device() && !(O::ON_DEVICE && self.form == StateForm::F32) {
            let kind = self.groups.kind;
            let what = format!("{kind} cannot update a model on a device: place it on the host");
            return Err(updating.misuse(what));
        }
        self.check_kinds()?;
        write!(lines, "{}", self.groups.lines()).expect("options have texts");
        if !self.fits(updating)? {
            self.make_state(updating)?;
        }
        Ok(())
    }

    fn prepare(&mut self, updating: &Updating<'_>) -> Result<(), Error> {
        let (groups, state) = self.parts();
        let options = &|id: ParamId| *groups.of(id.unit, id.index);
        O::exchange(RuleExchange { options, state, updating })
    }

    fn begin(&mut self, updating: &Updating<'_>) {
        self.parts().1.begin(updating);
    }

    fn update(&mut self, run: Run<'_>) {
        let (groups, state) = self.parts();
        let Run { unit, piece, .. } = run;
        let number = state.covered.count(ParamId { unit, index: piece.param });
        let spec = groups.spec();
        let of_run = RunState { state: &mut *state, spec, unit, piece: Some(piece) };
        groups.of(unit, piece.param).update(number, run, of_run);
        if state.exchange.is_some() {
            state.staged.matrices.applied(piece.len);
        }
    }

    fn update_on_device(
        &mut self,
        DeviceRun { unit, stream, mut update, pieces, clip }: DeviceRun<'_>,
    ) -> Result<(), CudaError> {
        let (groups, state) = self.parts();
        for (options, has) in groups.each() {
            let own = pieces.iter().copied().filter(|piece| has(unit, piece.param));
            let pieces: Vec<Piece> = own.collect();
            if !pieces.is_empty() {
                let run = DeviceRun { unit, stream, update: reborrow(&mut update), pieces, clip };
                let state = RunState { state: &mut *state, spec: groups.spec(), unit, piece: None };
                options.update_on_device(run, state)?;
            }
        }
        Ok(())
    }

    fn set_learning_rate(&mut self, rate: f64) {
        self.groups.set_learning_rate(rate);
    }
}

impl<O: Rule> Checkpointed for Grouped<O> {
    fn is_of(&self, model: &ModelId) -> bool {
        self.model == *model
    }

    fn head(&self, spec: &ModelSpec) -> OptimizerHead {
        let counted = self.state.iter().filter(|_| O::COUNTS);
        let updates = counted.flat_map(|state| state.covered.counts(spec)).collect();
        OptimizerHead {
            kind: self.groups.kind.to_owned(),
            options: self.groups.json(),
            made_with: Some(self.groups.made_with()),
            updates,
            is_open: self.state.iter().any(|state| state.covered.is_open()),
        }
    }

    fn kinds(&self) -> Vec<&'static str> {
        self.kinds_with(&self.groups.options).to_vec()
    }

    fn tensors(&self) -> Vec<StateTensor> {
        let options = &self.groups.options;
        let spec = self.groups.spec();
        let parameters = self.state.iter().flat_map(|state| state.covered.parameters());
        parameters.flat_map(|id| self.tensors_of(options, id, &spec[id])).collect()
    }

    fn expected(&self, saved: &SavedState<'_>) -> Expected {
        let groups = self.groups.following(saved.options).unwrap_or_else(|_| self.groups.clone());
        let parameters = self.covered_in(saved, &groups.options);
        let of = |id: &ParamId| self.tensors_of(&groups.options, *id, saved.parameter(*id));
        let tensors = parameters.iter().flat_map(of).collect();
        Expected { tensors, counted: if O::COUNTS { parameters } else { Vec::new() } }
    }

    fn state<'a>(
        &'a self,
        model: &ShardedModel,
        kind: &str,
        parameter: ParamId,
        range: Range<usize>,
    ) -> Result<Option<Cow<'a, [f32]>>, Error> {
        let Some(state) = &self.state else { return Ok(None) };
        state.elements(model.site("saving"), kind, parameter, range)
    }

    fn copy_state(
        &self,
        model: &ShardedModel,
        kind: &str,
        parameter: ParamId,
        start: usize,
        into: &mut [f32],
    ) -> Result<bool, Error> {
        let Some(state) = &self.state else { return Ok(false) };
        state.copy_elements(model.site("saving"), kind, parameter, start, into)
    }

    fn restored(&self, _: &ShardedModel, saved: &SavedState<'_>) -> Result<Self, Problem> {
        let groups = self.groups.following(saved.options).map_err(Problem::lasting)?;
        let has: BTreeSet<ParamId> = self.covered_in(saved, &groups.options).into_iter().collect();
        let read = || {
            let site = saved.site();
            let mut state = self.zeros(&groups.options, site, &|id| has.contains(&id))?;
            state.covered.read(saved);
            state.fill(site, |kind, id, start, into| saved.read(kind, id, start, into))?;
            Ok::<_, Problem>(state)
        };
        let state = (!has.is_empty()).then(read).transpose()?;
        Ok(Self { model: self.model.clone(), form: self.form, groups, state })
    }
}
