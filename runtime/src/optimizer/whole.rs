//! Updates of whole parameters that a program writes down.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::{self, Debug};
use std::ops::Range;
use std::sync::Arc;

use hsdp_checkpoint::OptimizerHead;
use hsdp_kernels::memory::Category;
use hsdp_sharding::{ModelSpec, Param, ParamId, Part, WholeMatrix, Wholes};
use serde_json::Value;

use crate::error::Error;
use crate::model::ShardedModel;
use crate::optimizer::exchange::{MatrixExchange, Staged};
use crate::optimizer::interface::{Optimizer, Run, Updating};
use crate::optimizer::state::Covered;
use crate::persist::checkpointed::{Checkpointed, Expected, Spread, StateTensor};
use crate::persist::problem::Problem;
use crate::persist::saved::SavedState;
use crate::state::context::{ErrorSite, ModelId};

/// A whole parameter on its owner.
#[derive(Debug)]
pub struct Whole<'a> {
    /// The parameter.
    pub param: &'a Param,
    /// Its elements in f32, row-major, which the update replaces.
    pub values: &'a mut [f32],
    /// Its gradient, divided and clipped, `[numel]`.
    pub gradient: &'a [f32],
    /// The state that the owner keeps, as long as was asked for. It is zeros at first.
    pub state: &'a mut [f32],
}

/// The state of an optimizer that updates whole parameters, such as Shampoo: each parameter has an
/// owner ([`Owners`](hsdp_sharding::Owners)), which gets all of it and keeps the state. An update
/// brings values and gradients to the owners in one all_to_all, and new values back in another one.
/// Owners are those of a shard group, and each replica computes the same, so the computation must
/// be deterministic. With [`StateOver::World`](crate::StateOver::World) each parameter has one
/// owner among all ranks.
///
/// No parameter and no state changes before all results have come.
///
/// ```
/// use hsdp::prelude::*;
/// use hsdp::{Gradients, Whole, WholeParameters};
/// # fn step(model: &mut ShardedModel, gradients: Gradients) -> Result<(), hsdp::Error> {
/// // Steps of the length of the rate, along the whole gradient of each parameter, which the state
/// // counts.
/// let mut normed = WholeParameters::new(model, "normed", |_| 1);
/// let mut update = normed.by(|Whole { values, gradient, state, .. }| {
///     let norm = gradient.iter().map(|it| it * it).sum::<f32>().sqrt().max(1e-12);
///     values.iter_mut().zip(gradient).for_each(|(value, it)| *value -= 0.01 * it / norm);
///     state[0] += 1.0;
/// });
/// update.step(model, gradients)?;
/// # Ok(())
/// # }
/// ```
pub struct WholeParameters {
    model: ModelId,
    kind: &'static str,
    len: StateLen,
    held: Option<WholeStates>,
}

/// Returns the number of elements of state of a parameter.
type StateLen = Arc<dyn Fn(&Param) -> usize + Send + Sync>;

impl Debug for WholeParameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, kind, len: _, held } = self;
        let mut shown = f.debug_struct("WholeParameters");
        shown.field("model", model).field("kind", kind).field("held", held).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct WholeStates {
    covered: Covered,
    exchange: MatrixExchange,
    /// Tensors of the state of all owners.
    tensors: Vec<StateTensor>,
    /// The state of the parameters that this rank owns.
    states: BTreeMap<ParamId, Vec<f32>>,
    staged: Staged,
    /// New state, until the update is certain.
    staged_states: BTreeMap<ParamId, Vec<f32>>,
}

/// Values and gradient.
const COPIES: usize = 2;

impl WholeParameters {
    /// Makes the state of a kind, such as `shampoo`: each parameter has `len` f32 of it on its
    /// owner. `len` returns the same number on all ranks, however often it is called.
    #[must_use]
    pub fn new(
        model: &ShardedModel,
        kind: &'static str,
        len: impl Fn(&Param) -> usize + Send + Sync + 'static,
    ) -> Self {
        Self { model: model.id().clone(), kind, len: Arc::new(len), held: None }
    }

    /// Returns the optimizer that updates parameters by this function: its step calls `update` on
    /// the owner of each parameter, and sends the new values back. It updates all trainable
    /// parameters, or some of them beside other optimizers of [`ShardedModel::update_by`]. Its
    /// updates are collective over the world.
    pub fn by<F: FnMut(Whole<'_>)>(&mut self, update: F) -> impl Optimizer {
        By { state: self, update }
    }

    fn zeros(
        &self,
        site: ErrorSite<'_>,
        has: impl Fn(ParamId) -> bool,
    ) -> Result<WholeStates, Error> {
        let context = site.context;
        let exchange = MatrixExchange::of(context, Wholes::Parameters, COPIES, &has)?;
        let len = |param: ParamId| (self.len)(&context.plan.spec()[param]);
        let tensors = exchange.owners().filter(|(whole, _)| len(whole.param) > 0);
        let tensors = tensors.map(|(whole, owner)| {
            let spread = Spread::Owned { len: len(whole.param), owner };
            StateTensor { kind: self.kind, parameter: whole.param, spread }
        });
        let tensors = tensors.collect();
        let zeros =
            |param: ParamId| Ok((param, site.zeros(Category::Optimizer, param.unit, len(param))?));
        let states = exchange.owned().map(|whole| zeros(whole.param));
        let states = states.collect::<Result<_, Error>>()?;
        let covered = Covered::of(context, has);
        let staged = Staged::default();
        let staged_states = BTreeMap::new();
        Ok(WholeStates { covered, exchange, tensors, states, staged, staged_states })
    }
}

impl WholeStates {
    /// Takes the state of the parameters that both have.
    ///
    /// # Errors
    /// The first parameter whose loaded state another rank owns now. All ranks find the same.
    fn take_over(&mut self, earlier: &Self) -> Result<(), ParamId> {
        let moved = |now: &&StateTensor| {
            let mut loaded =
                earlier.tensors.iter().filter(|it| earlier.covered.has_loaded(it.parameter));
            loaded.any(|it| it.parameter == now.parameter && it.spread != now.spread)
        };
        if let Some(moved) = self.tensors.iter().find(moved) {
            return Err(moved.parameter);
        }
        self.covered.take_over(&earlier.covered);
        for (parameter, state) in &mut self.states {
            if let Some(earlier) = earlier.states.get(parameter) {
                state.copy_from_slice(earlier);
            }
        }
        Ok(())
    }
}

impl WholeParameters {
    /// The parameters that a checkpoint says it has updated, also those without state.
    fn covered_in(&self, saved: &SavedState<'_>) -> Vec<ParamId> {
        let mut covered = saved.parameters_with(&[self.kind]);
        let without = saved.counted_without_state().into_iter();
        covered.extend(without.filter(|id| (self.len)(saved.parameter(*id)) == 0));
        covered.sort_unstable();
        covered.dedup();
        covered
    }
}

struct By<'a, F> {
    state: &'a mut WholeParameters,
    update: F,
}

impl<F> By<'_, F> {
    fn held(&mut self) -> &mut WholeStates {
        self.state.held.as_mut().expect("`check` has made it")
    }
}

impl<F: FnMut(Whole<'_>)> Optimizer for By<'_, F> {
    fn is_collective(&self) -> bool {
        true
    }

    fn kind(&self) -> Option<&'static str> {
        Some(self.state.kind)
    }

    fn check(&mut self, updating: &Updating<'_>, lines: &mut String) -> Result<(), Error> {
        let state = &mut *self.state;
        updating.check_owner(&state.model)?;
        if updating.is_on_device() {
            let what =
                format!("{} cannot update a model on a device: place it on the host", state.kind);
            return Err(updating.misuse(what));
        }
        lines.push_str(state.kind);
        lines.push('\n');
        let zeros = || state.zeros(updating.site(), |id| updating.has(id));
        let Some(held) = &state.held else {
            state.held = Some(zeros()?);
            return Ok(());
        };
        if !held.covered.check(state.kind, updating)? {
            let mut changed = zeros()?;
            changed.take_over(held).map_err(|moved| {
                let name = &updating.plan().spec()[moved].name;
                let what = format!(
                    "parameter `{name}`: another rank would own its state of {}, because the \
                     update has parameters that the checkpoint has no state of; load it with all \
                     of its parameters",
                    state.kind
                );
                Error::Options { what }
            })?;
            state.held = Some(changed);
        }
        Ok(())
    }

    fn prepare(&mut self, updating: &Updating<'_>) -> Result<(), Error> {
        let Self { state, update } = self;
        let held = state.held.as_mut().expect("`check` has made it");
        (held.staged, held.staged_states) = (Staged::default(), BTreeMap::new());
        let mut states = copies(updating.site(), &held.states)?;
        let fill = |part: &Part, into: &mut [f32]| {
            let (values, gradient) = into.split_at_mut(part.shard.len());
            updating.parameters(part.unit, part.shard.clone(), values)?;
            let parameter = held.exchange.matrix(part).param;
            updating.gradient(parameter, part.shard.clone(), gradient)?;
            gradient.iter_mut().for_each(|it| *it *= updating.clip());
            Ok(())
        };
        let spec = updating.plan().spec();
        // The program's function gets one parameter at a time.
        let alone = |matrix: &WholeMatrix| {
            let param = matrix.param;
            updating.updates(param).then_some(param)
        };
        let values = held.exchange.run(
            updating.site(),
            &held.exchange.together(alone),
            |values| held.exchange.each_sent(values, fill),
            |bundle, copies| {
                let param = bundle.first.param;
                let (values, gradient) = copies.split_at_mut(bundle.first.numel());
                let state = states.get_mut(&param).expect("its owner has state");
                update(Whole { param: &spec[param], values, gradient, state });
                Ok(())
            },
        )?;
        (held.staged, held.staged_states) = (Staged::new(values), states);
        Ok(())
    }

    fn begin(&mut self, updating: &Updating<'_>) {
        let held = self.held();
        held.covered.begin(updating);
        for (id, state) in std::mem::take(&mut held.staged_states) {
            held.states.get_mut(&id).expect("a copy of it").copy_from_slice(&state);
        }
        held.staged.begin(updating);
    }

    fn update(&mut self, Run { unit, piece, parameters, .. }: Run<'_>) {
        let WholeStates { exchange, staged, .. } = self.held();
        for (_, range, place) in exchange.within(unit, &piece) {
            parameters[range].copy_from_slice(&staged.values()[place]);
        }
        staged.applied(piece.len);
    }

    fn set_learning_rate(&mut self, _: f64) {}
}

/// Copies state, for an update that may not be made.
fn copies(
    site: ErrorSite<'_>,
    states: &BTreeMap<ParamId, Vec<f32>>,
) -> Result<BTreeMap<ParamId, Vec<f32>>, Error> {
    let copy = |(id, state): (&ParamId, &Vec<f32>)| {
        let mut copy = site.zeros(Category::Update, id.unit, state.len())?;
        copy.copy_from_slice(state);
        Ok((*id, copy))
    };
    states.iter().map(copy).collect()
}

impl Checkpointed for WholeParameters {
    fn head(&self, spec: &ModelSpec) -> OptimizerHead {
        let updates = self.held.iter().flat_map(|held| held.covered.counts(spec)).collect();
        let kind = self.kind.to_owned();
        OptimizerHead {
            kind,
            options: Value::Null,
            made_with: None,
            updates,
            is_open: self.held.as_ref().is_some_and(|held| held.covered.is_open()),
        }
    }

    fn is_of(&self, model: &ModelId) -> bool {
        self.model == *model
    }

    fn kinds(&self) -> Vec<&'static str> {
        vec![self.kind]
    }

    fn tensors(&self) -> Vec<StateTensor> {
        self.held.as_ref().map_or_else(Vec::new, |held| held.tensors.clone())
    }

    fn expected(&self, saved: &SavedState<'_>) -> Expected {
        let counted = self.covered_in(saved);
        let of = |parameter: &ParamId| {
            let len = (self.len)(saved.parameter(*parameter));
            let spread = Spread::Owned { len, owner: 0 };
            (len > 0).then_some(StateTensor { kind: self.kind, parameter: *parameter, spread })
        };
        Expected { tensors: counted.iter().filter_map(of).collect(), counted }
    }

    fn state<'a>(
        &'a self,
        _: &ShardedModel,
        kind: &str,
        parameter: ParamId,
        range: Range<usize>,
    ) -> Result<Option<Cow<'a, [f32]>>, Error> {
        let held = self.held.as_ref().filter(|_| kind == self.kind);
        let state = held.and_then(|held| held.states.get(&parameter));
        Ok(state.map(|state| Cow::Borrowed(&state[range])))
    }

    fn restored(&self, _: &ShardedModel, saved: &SavedState<'_>) -> Result<Self, Problem> {
        let has = self.covered_in(saved);
        let Self { model, kind, len, held: _ } = self;
        let mut restored =
            Self { model: model.clone(), kind: *kind, len: Arc::clone(len), held: None };
        if has.is_empty() {
            return Ok(restored);
        }
        let mut held = self.zeros(saved.site(), |id| has.contains(&id))?;
        held.covered.read(saved);
        for (parameter, state) in held.states.iter_mut().filter(|(_, state)| !state.is_empty()) {
            saved.read(self.kind, *parameter, 0, state)?;
        }
        restored.held = Some(held);
        Ok(restored)
    }
}
