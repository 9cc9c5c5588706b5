//! The differences between a checkpoint and a model with its optimizer, and the part of a
//! checkpoint that fits in spite of them.

use std::collections::{BTreeMap, BTreeSet};

use hsdp_checkpoint::{Manifest, OptimizerHead, STATE, listed, state_tensor};
use hsdp_sharding::{Param, ParamId, Role};
use hsdp_warnings::cut;

use super::options;
use super::settings::{Content, OtherOptions, OtherParameters};
use crate::persist::checkpointed::{BufferState, Checkpointed, Expected, Spread, StateTensor};
use crate::persist::problem::Problem;
use crate::persist::saved::{FittingParts, SavedOptions, SavedState, Stateful, Unmatched};
use crate::state::context::Context;

/// Maximum number of characters of a setting's name or value in an error.
const MOST_SHOWN: usize = 100;

/// The parameters that a checkpoint has.
pub(super) fn content_of(manifest: &Manifest) -> Content {
    match manifest.frozen_digest {
        None => Content::All,
        Some(_) => Content::Trainable,
    }
}

/// Content that a load wants of a checkpoint, and its rules for differences.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoadWanted {
    pub(super) content: Content,
    pub(super) other_options: OtherOptions,
    pub(super) other_parameters: OtherParameters,
}

/// Refuses a checkpoint of another model or optimizer, and one without frozen parameters where all
/// are `wanted`. Returns the options that the optimizer takes, and what fits if that is asked for.
pub(super) fn check<'a, O: Checkpointed>(
    saved: SavedState<'a>,
    optimizer: &O,
    wanted: LoadWanted,
) -> Result<(SavedOptions<'a>, Option<FittingParts>), Problem> {
    let LoadWanted { content, other_options, other_parameters } = wanted;
    let SavedState { context, generation, .. } = saved;
    let manifest = generation.manifest();
    let path = generation.path().display();
    let refused = |what: String| Err(Problem::lasting(what));
    let own = optimizer.head(context.plan.spec());
    let options = options::agreed(manifest, &own, other_options, other_parameters);
    let saved = SavedState { options: options.clone().unwrap_or(saved.options), ..saved };
    let fits = other_parameters == OtherParameters::TakeFitting;
    let mut wrong = Vec::new();
    let mut fitting = None;
    if !fits {
        wrong.push(other_settings(context, manifest));
    }
    match other_optimizer(manifest, &own) {
        Some(other) => wrong.push(vec![other]),
        None if fits => {
            let states = optimizer.buffer_states();
            fitting = Some(FittingParts::of(&saved, &optimizer.expected(&saved), &states));
        }
        None => wrong.extend(differences(&saved, optimizer)),
    }
    let wrong = listed_by_kind(&wrong);
    let options = match (wrong.is_empty(), options) {
        (true, Ok(options)) => options,
        (true, Err(others)) => return refused(format!("{path}: {others}")),
        (false, others) => {
            let others = others.err().map_or_else(String::new, |others| format!("; {others}"));
            return refused(format!("{path} is of another model: {wrong}{others}"));
        }
    };
    check_frozen(saved, content)?;
    Ok((options, fitting))
}

/// Refuses a checkpoint whose parameters are not those of the model, whatever else it has. Returns
/// what fits, if only that is taken.
pub(super) fn check_weights(
    saved: SavedState<'_>,
    wanted: LoadWanted,
) -> Result<Option<FittingParts>, Problem> {
    if wanted.other_parameters == OtherParameters::TakeFitting {
        let mut fitting = FittingParts::of(&saved, &Expected::default(), &[]);
        fitting.lists.new_states.clear();
        fitting.lists.left_over.retain(|name| !name.starts_with(STATE));
        check_frozen(saved, wanted.content)?;
        return Ok(Some(fitting));
    }
    let names = saved.generation.manifest().tensors.keys();
    let mut wrong = vec![other_settings(saved.context, saved.generation.manifest())];
    wrong.extend(wrong_tensors(&saved, &[], &[], names.filter(|name| !name.starts_with(STATE))));
    let wrong = listed_by_kind(&wrong);
    if !wrong.is_empty() {
        let path = saved.generation.path().display();
        let what = format!("{path} is of another model: {wrong}");
        return Err(Problem::lasting(what));
    }
    check_frozen(saved, wanted.content)?;
    Ok(None)
}

/// Refuses a checkpoint without frozen parameters where all are wanted.
fn check_frozen(saved: SavedState<'_>, content: Content) -> Result<(), Problem> {
    let SavedState { context, generation, .. } = saved;
    let manifest = generation.manifest();
    let path = generation.path().display();
    let frozen = context.plan.spec().params().filter(|(_, param)| param.role == Role::Frozen);
    let frozen: Vec<_> = frozen.map(|(_, param)| format!("`{}`", param.name)).collect();
    let lacks = (content_of(manifest), content) == (Content::Trainable, Content::All);
    if lacks && !frozen.is_empty() {
        let what = format!(
            "{path} has the trainable parameters alone, and lacks the frozen ones: {}; give the \
             model its frozen parameters, and open its \
             checkpoints with Content::Trainable",
            listed(&frozen, ", ")
        );
        return Err(Problem::lasting(what));
    }
    Ok(())
}

/// Returns the text of an optimizer of another kind than the program's.
fn other_optimizer(manifest: &Manifest, own: &OptimizerHead) -> Option<String> {
    match &manifest.optimizer {
        Some(OptimizerHead { kind, .. }) if *kind == own.kind => None,
        Some(OptimizerHead { kind, .. }) => {
            Some(format!("its optimizer is {}, not {}", kind.escape_debug(), own.kind))
        }
        None => Some("it has no optimizer".to_owned()),
    }
}

/// Joins the texts of differences, of each kind the first few.
pub(super) fn listed_by_kind(kinds: &[Vec<String>]) -> String {
    let kinds = kinds.iter().filter(|texts| !texts.is_empty());
    kinds.map(|texts| listed(texts, "; ")).collect::<Vec<_>>().join("; ")
}

/// Returns all differences between a checkpoint and this model and optimizer, by kind.
fn differences<O: Checkpointed>(saved: &SavedState<'_>, optimizer: &O) -> Vec<Vec<String>> {
    let Expected { tensors, counted } = optimizer.expected(saved);
    let mut wrong = vec![missing_counts(saved, &counted)];
    let buffers = optimizer.buffer_states();
    let names = saved.generation.manifest().tensors.keys();
    wrong.extend(wrong_tensors(saved, &tensors, &buffers, names));
    wrong
}

/// Compares the tensors of a checkpoint with those of the model, with `states` and with the states
/// of `buffers`. Returns a text for each that has another shape, is a buffer on one side alone, or
/// is missing, and for each of `names`, tensors of the checkpoint, that is left over: parameters
/// and buffers before states.
fn wrong_tensors<'a>(
    saved: &SavedState<'a>,
    states: &[StateTensor],
    buffers: &[BufferState],
    names: impl Iterator<Item = &'a String>,
) -> [Vec<String>; 4] {
    let context = saved.context;
    let manifest = saved.generation.manifest();
    let mut reshaped = Vec::new();
    let mut other_kinds = Vec::new();
    let mut missing = Vec::new();
    let mut expected = BTreeSet::new();
    let is_state = |name: &str| name.starts_with(STATE);
    let mut named = named(context, content_of(manifest), states);
    named.extend(named_of_buffers(context, buffers));
    named.sort_by_key(|(name, _)| is_state(name));
    for (name, shape) in named {
        other_kinds.extend(other_kind(saved, &name));
        match manifest.tensors.get(&name) {
            None => missing.push(format!("`{name}` is missing")),
            Some(tensor) if tensor.shape != shape => {
                reshaped.push(format!("`{name}` has shape {:?}, not {shape:?}", tensor.shape));
            }
            Some(_) => {}
        }
        expected.insert(name);
    }
    let mut left_over: Vec<_> = names.filter(|name| !expected.contains(*name)).collect();
    left_over.sort_by_key(|name| is_state(name));
    let left_over = left_over.into_iter().map(|name| left_over_text(saved, name)).collect();
    [reshaped, other_kinds, missing, left_over]
}

/// Returns the text of a tensor that is a buffer in the checkpoint or in the model, and a parameter
/// in the other.
fn other_kind(saved: &SavedState<'_>, name: &str) -> Option<String> {
    let manifest = saved.generation.manifest();
    let spec = saved.context.plan.spec();
    let is_known = spec.tensors().any(|tensor| tensor.name == name);
    let is_buffer = [manifest.buffers.contains(name), spec.find_buffer(name).is_some()];
    let is_there = is_known && manifest.tensors.contains_key(name);
    let name = name.escape_debug();
    match is_buffer {
        [true, false] if is_there => {
            Some(format!("`{name}` is a buffer there, and a parameter in this model"))
        }
        [false, true] if is_there => {
            Some(format!("`{name}` is a parameter there, and a buffer in this model"))
        }
        _ => None,
    }
}

/// Returns the names and shapes of the buffers, and those of their states, one after the other.
fn named_of_buffers(context: &Context, states: &[BufferState]) -> Vec<(String, Vec<u64>)> {
    let named = context.plan.spec().buffers().flat_map(|(id, buffer)| {
        let states = states.iter().filter(move |state| state.buffer == id);
        let states = states.map(|state| state_tensor(state.kind, &buffer.name));
        let names = [buffer.name.clone()].into_iter().chain(states);
        names.map(|name| (name, Spread::Elements.shape(buffer)))
    });
    named.collect()
}

/// Returns the names and shapes of the tensors that a checkpoint should have: those of each
/// parameter, one after the other.
fn named(context: &Context, content: Content, tensors: &[StateTensor]) -> Vec<(String, Vec<u64>)> {
    let mut of_parameter = BTreeMap::<ParamId, Vec<&StateTensor>>::new();
    for tensor in tensors {
        of_parameter.entry(tensor.parameter).or_default().push(tensor);
    }
    let params = context.plan.spec().params().filter(|(_, param)| content.has(param.role));
    let named = params.flat_map(|(id, param)| {
        let states = of_parameter.get(&id).into_iter().flatten();
        let states = states.map(|it| (state_tensor(it.kind, &param.name), it.spread.shape(param)));
        [(param.name.clone(), Spread::Elements.shape(param))].into_iter().chain(states)
    });
    named.collect()
}

/// Returns the text of a tensor that the model does not read.
fn left_over_text(saved: &SavedState<'_>, name: &str) -> String {
    let shown = name.escape_debug();
    if let Some(text) = other_kind(saved, name) {
        return text;
    }
    if saved.context.plan.spec().params().any(|(_, param)| param.name == name) {
        return format!("`{shown}` is trainable there, and frozen in this model");
    }
    let what = match name {
        state if state.starts_with(STATE) => "state",
        buffer if saved.generation.manifest().buffers.contains(buffer) => "a buffer",
        _ => "a parameter",
    };
    format!("`{shown}` is {what} that this model does not have")
}

/// Returns the parameters whose updates the optimizer counts and the checkpoint does not, one text
/// for each.
fn missing_counts(saved: &SavedState<'_>, counted: &[ParamId]) -> Vec<String> {
    let manifest = saved.generation.manifest();
    let Some(OptimizerHead { updates, .. }) = &manifest.optimizer else { return Vec::new() };
    let names = counted.iter().map(|id| &saved.context.plan.spec()[*id].name);
    let missing = names.filter(|name| !updates.contains_key(*name));
    missing.map(|name| format!("the number of updates of `{name}` is missing")).collect()
}

/// Compares the settings that a checkpoint states with those of the model. Returns a text for all
/// that differ, with both values of each. An older checkpoint states none, and a setting that only
/// the model states may be new in the program, so these alone make no other model.
fn other_settings(context: &Context, manifest: &Manifest) -> Vec<String> {
    let own: BTreeMap<&str, &str> = context.plan.spec().settings().collect();
    let saved: BTreeMap<&str, &str> =
        manifest.settings.iter().map(|(name, value)| (&**name, &**value)).collect();
    if saved.iter().all(|(name, value)| own.get(name) == Some(value)) {
        return Vec::new();
    }
    let names: BTreeSet<&str> = saved.keys().chain(own.keys()).copied().collect();
    let shown = |value: Option<&&str>| cut(value.unwrap_or(&"missing"), MOST_SHOWN);
    let others = names.into_iter().filter(|name| saved.get(name) != own.get(name)).map(|name| {
        let [there, here] = [&saved, &own].map(|settings| shown(settings.get(name)));
        format!("{} is {there} there, and {here} here", cut(name, MOST_SHOWN))
    });
    vec![format!("its settings are others: {}", others.collect::<Vec<_>>().join(", "))]
}

impl FittingParts {
    /// Compares a checkpoint with the model and the tensors, counts and states of `buffers` that an
    /// optimizer expects.
    pub(super) fn of(saved: &SavedState<'_>, expected: &Expected, buffers: &[BufferState]) -> Self {
        let spec = saved.context.plan.spec();
        let manifest = saved.generation.manifest();
        let mut of_parameter = BTreeMap::<ParamId, Vec<&StateTensor>>::new();
        for tensor in &expected.tensors {
            of_parameter.entry(tensor.parameter).or_default().push(tensor);
        }
        let stateful = Stateful::of(manifest);
        let mut fitting = Self::default();
        let mut used = BTreeSet::new();
        for (id, param) in spec.params() {
            let has_value = has_value(manifest, param);
            if has_value {
                used.insert(param.name.clone());
            } else {
                fitting.lacking.insert(id);
                // The digest of the frozen parameters stands for those that the files leave out.
                let is_base = param.role == Role::Frozen
                    && manifest.frozen_digest.is_some()
                    && !manifest.tensors.contains_key(&param.name);
                if !is_base {
                    fitting.lists.new_parameters.push(param.name.clone());
                }
            }
            if param.role == Role::Frozen {
                continue;
            }
            let states = of_parameter.get(&id).into_iter().flatten();
            let states: Vec<(String, Vec<u64>)> = states
                .map(|it| (state_tensor(it.kind, &param.name), it.spread.shape(param)))
                .collect();
            let is_there = |(name, shape): &(String, Vec<u64>)| {
                manifest.tensors.get(name).is_some_and(|tensor| tensor.shape == *shape)
            };
            let is_counted = || stateful.counted.contains(&*param.name);
            let is_whole = has_value
                && states.iter().all(is_there)
                && (!expected.counted.contains(&id) || is_counted());
            if is_whole {
                fitting.states.insert(id);
                used.extend(states.into_iter().map(|(name, _)| name));
            }
            if !is_whole && stateful.any() || stateful.lacks(&param.name) {
                fitting.lists.new_states.push(param.name.clone());
            }
        }
        for (id, buffer) in spec.buffers() {
            let states = buffers.iter().filter(|state| state.buffer == id);
            let states: Vec<String> =
                states.map(|state| state_tensor(state.kind, &buffer.name)).collect();
            if has_value(manifest, buffer) {
                used.insert(buffer.name.clone());
            } else {
                fitting.lacking_buffers.insert(id);
                fitting.lists.new_buffers.push(buffer.name.clone());
            }
            let is_whole = has_value(manifest, buffer)
                && states.iter().all(|name| has_tensor(manifest, name, buffer));
            if is_whole {
                fitting.buffer_states.insert(id);
                used.extend(states);
            } else if !states.is_empty() {
                fitting.lists.new_buffer_states.push(buffer.name.clone());
            }
        }
        let left_over = manifest.tensors.keys().filter(|name| !used.contains(*name));
        fitting.lists.left_over = left_over.cloned().collect();
        fitting.lists.other_settings = other_settings(saved.context, manifest);
        fitting
    }
}

/// Returns whether a checkpoint has values of a parameter or a buffer, with its shape.
fn has_value(manifest: &Manifest, param: &Param) -> bool {
    has_tensor(manifest, &param.name, param)
}

/// Returns whether a checkpoint has a tensor of this name with the shape of a parameter or buffer.
fn has_tensor(manifest: &Manifest, name: &str, param: &Param) -> bool {
    let shape = param.shape.iter().map(|size| *size as u64);
    manifest.tensors.get(name).is_some_and(|tensor| shape.eq(tensor.shape.iter().copied()))
}

impl Unmatched {
    /// Returns a text for a warning, if something does not fit. It names the first few tensors of
    /// each list.
    pub(super) fn text(&self) -> Option<String> {
        let Self {
            new_parameters,
            new_buffers,
            new_states,
            new_buffer_states,
            left_over,
            other_settings,
        } = self;
        let lists = [
            ("parameters that keep the values of the model", new_parameters),
            ("buffers that keep the values of the model", new_buffers),
            ("parameters whose optimizer state begins anew", new_states),
            ("buffers whose averages begin anew", new_buffer_states),
            ("tensors of the checkpoint that are left over", left_over),
        ];
        let lists = lists.into_iter().filter(|(_, names)| !names.is_empty());
        let text = |(what, names): (&str, &Vec<String>)| {
            let names: Vec<String> = names.iter().map(|it| it.escape_debug().to_string()).collect();
            format!("{what}: {}", listed(&names, ", "))
        };
        let texts: Vec<String> = other_settings.iter().cloned().chain(lists.map(text)).collect();
        (!texts.is_empty()).then(|| {
            format!(
                "the checkpoint is of another model, of which this one takes what fits; {}",
                texts.join("; ")
            )
        })
    }
}
