//! The parameters that a model's constructors ask a `VarBuilder` for.

mod backward;
mod initial;

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{DType, Device, Result as CandleResult, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use hsdp_sharding::{AfterForward, ModelSpec, Param, Statistics, Unit};
use parking_lot::Mutex;

use crate::error::{DeclarationError, Error, listed};

/// Calls `load` with a `VarBuilder` that records the requested parameters. Not collective.
///
/// The tensors that `load` gets have one element each, which is repeated over the shape, so a model
/// larger than the memory can be recorded. (A constructor that computes with them, by a
/// concatenation, say, allocates the result.) The builder has the dtype f32 and the CPU. Its
/// `contains_tensor` is true for names that were requested before. `get_unchecked` fails, because
/// it gives no shape.
///
/// # Errors
/// The error of `load`; [`DeclarationError::Reshaped`](crate::DeclarationError::Reshaped) if it
/// asks for one name with two shapes, and
/// [`DeclarationError::NoShape`](crate::DeclarationError::NoShape);
/// [`DeclarationError::Buffers`](crate::DeclarationError::Buffers) if it asks for the running
/// statistics of a norm or a codebook, or for integers. These are no parameters, and candle's layers
/// would change copies of them.
pub fn record<M>(
    load: impl FnOnce(VarBuilder<'static>) -> CandleResult<M>,
) -> Result<Recorded, Error> {
    let asked = Arc::<Mutex<AskedParameters>>::default();
    let recorder = Box::new(VarRecorder(Arc::clone(&asked)));
    load(VarBuilder::from_backend(recorder, DType::F32, Device::Cpu))?;
    let AskedParameters { parameters, buffers, .. } = std::mem::take(&mut *asked.lock());
    if !buffers.is_empty() {
        let names = listed(buffers.iter());
        return Err(Error::Declaration(DeclarationError::Buffers { names }));
    }
    Ok(Recorded { parameters, norms: Vec::new(), marked: Vec::new(), redeclared: None })
}

/// Parameters that a model's constructors asked for, in this order, with their shapes and
/// initialization hints.
#[derive(Clone, Debug)]
pub struct Recorded {
    parameters: Vec<RecordedParameter>,
    /// Batch norms that the program has added.
    norms: Vec<Statistics>,
    /// Names of marked units, each with its mark.
    marked: Vec<(String, Mark)>,
    /// First parameter that `map` gave another name or shape, as recorded and as changed.
    redeclared: Option<(Param, Param)>,
}

/// Setting of a unit.
#[derive(Clone, Copy, Debug)]
enum Mark {
    AfterForward(AfterForward),
    ComputeIn(hsdp::DType),
}

#[derive(Clone, Debug)]
struct RecordedParameter {
    param: Param,
    init: Init,
    /// Whether the constructors asked for it more than once.
    is_tied: bool,
    /// Row along the first dim that starts at 0, as for a padding token.
    zero_row: Option<usize>,
}

impl Recorded {
    /// Returns the parameters, in the order in which the constructors asked for them, and then the
    /// parameters and buffers of added [batch norms](Self::batch_norm).
    pub fn params(&self) -> impl ExactSizeIterator<Item = &Param> {
        self.parameters.iter().map(|parameter| &parameter.param)
    }

    /// Replaces the declaration of each parameter with the result of `change`: `map(Param::frozen)`
    /// freezes all. If `change` alters a name or a shape, [`spec`](Self::spec) fails.
    #[must_use]
    pub fn map(mut self, mut change: impl FnMut(Param) -> Param) -> Self {
        for RecordedParameter { param, .. } in &mut self.parameters {
            let changed = change(param.clone());
            if (&changed.name, &changed.shape) != (&param.name, &param.shape) {
                self.redeclared.get_or_insert((param.clone(), changed));
                continue;
            }
            *param = changed;
        }
        self
    }

    /// Adds a batch norm over `channels` with statistics over all ranks, which a forward applies
    /// with `hsdp_models::nn::batch_norm`: the parameters `{name}.weight`, 1 at first, and
    /// `{name}.bias`, 0, and the buffers `{name}.running_mean`, 0, and `{name}.running_var`, 1. They
    /// belong to the unit whose pattern takes these names. Add several in the order of the forward.
    #[must_use]
    pub fn batch_norm(mut self, name: &str, channels: usize) -> Self {
        let norm = Unit::new(name).batch_norm(name, channels);
        let values = [1.0, 0.0, 0.0, 1.0]; // weight, bias, running mean, running variance
        for (param, value) in norm.params.into_iter().chain(norm.buffers).zip(values) {
            let init = Init::Const(value);
            self.parameters.push(RecordedParameter { param, init, is_tied: false, zero_row: None });
        }
        self.norms.extend(norm.statistics);
        self
    }

    /// Marks a unit of the [`spec`](Self::spec) as [`keep`](hsdp_sharding::Unit::keep). This is for
    /// a unit that the forward enters twice, or whose parameter another unit reads. (A unit with a
    /// name that was requested twice is kept without this.)
    #[must_use]
    pub fn keep(mut self, unit: impl Into<String>) -> Self {
        self.marked.push((unit.into(), Mark::AfterForward(AfterForward::Keep)));
        self
    }

    /// Marks a unit of the [`spec`](Self::spec) as
    /// [`forward_only`](hsdp_sharding::Unit::forward_only). This is for a unit whose parameters are
    /// all frozen and whose input needs no gradient, such as an embedding.
    #[must_use]
    pub fn forward_only(mut self, unit: impl Into<String>) -> Self {
        self.marked.push((unit.into(), Mark::AfterForward(AfterForward::Discard)));
        self
    }

    /// Makes a unit of the [`spec`](Self::spec) [compute in
    /// `dtype`](hsdp_sharding::Unit::compute_in) in place of
    /// [`Precision::parameters`](hsdp::Precision::parameters).
    #[must_use]
    pub fn compute_in(mut self, unit: impl Into<String>, dtype: hsdp::DType) -> Self {
        self.marked.push((unit.into(), Mark::ComputeIn(dtype)));
        self
    }

    /// Sets the initial values of a row of a parameter to 0, such as the row of a padding token.
    /// `row` is an index along the first dim. A name that is not recorded changes nothing.
    #[must_use]
    pub fn with_zero_row(mut self, parameter: &str, row: usize) -> Self {
        for it in self.parameters.iter_mut().filter(|it| it.param.name == parameter) {
            it.zero_row = Some(row);
        }
        self
    }

    /// Makes units by patterns in the order of the forward: `["model.embed_tokens",
    /// "model.layers.*", "root"]`.
    ///
    /// A pattern is compared with the first components of a name, which dots separate; `*` is any
    /// one component. The first pattern that matches takes the name. Each distinct match makes a
    /// unit, which has the matched components as its name: `model.layers.0`. The units of one
    /// pattern are in the order of the recording. The pattern `root`, at any place, makes one unit
    /// of all names that no other pattern takes. A unit with a name that was requested twice (tied
    /// weights) is kept.
    ///
    /// # Errors
    /// [`DeclarationError::NoUnit`](crate::DeclarationError::NoUnit) if no pattern takes a name;
    /// [`DeclarationError::EmptyPattern`](crate::DeclarationError::EmptyPattern) if a pattern takes
    /// no name; [`DeclarationError::UnknownUnit`](crate::DeclarationError::UnknownUnit) if a marked
    /// unit does not exist; [`DeclarationError::Redeclared`](crate::DeclarationError::Redeclared)
    /// if [`map`](Self::map) changed a name or a shape; the planner's error if the units make no
    /// model.
    pub fn spec(&self, patterns: &[&str]) -> Result<ModelSpec, Error> {
        if let Some((recorded, changed)) = self.redeclared.clone() {
            return Err(Error::Declaration(DeclarationError::Redeclared {
                parameter: recorded.name,
                recorded: recorded.shape,
                name: changed.name,
                shape: changed.shape,
            }));
        }
        let mut units = group(&self.parameters, patterns)?;
        for norm in &self.norms {
            let weight = format!("{}.weight", norm.name);
            let holds = |unit: &&mut Unit| unit.params.iter().any(|param| param.name == weight);
            let Some(unit) = units.iter_mut().find(holds) else {
                // `map` has made a buffer of it.
                return Err(Error::Declaration(DeclarationError::IsBuffer {
                    unit: norm.name.clone(),
                    name: weight,
                }));
            };
            unit.statistics.push(norm.clone());
        }
        for (name, mark) in &self.marked {
            let Some(place) = units.iter().position(|unit| unit.name == *name) else {
                return Err(Error::Declaration(DeclarationError::unknown_unit(name, &units)));
            };
            match *mark {
                Mark::AfterForward(after_forward) => units[place].after_forward = after_forward,
                Mark::ComputeIn(dtype) => units[place].compute_dtype = Some(dtype),
            }
        }
        let spec = units.into_iter().fold(ModelSpec::new(), ModelSpec::unit);
        spec.validate()?;
        Ok(spec)
    }

    /// Returns the initial values of parameters by their hints, for
    /// [`ShardedModel::new`](hsdp::ShardedModel::new) and
    /// [`Import::or_init`](hsdp::checkpoint::Import::or_init). They depend on seed and name only,
    /// so they are the same on all ranks of any mesh. The distributions are those of
    /// [`candle_nn::Init`], but the numbers differ from candle's. A parameter that was not recorded
    /// gets no values, which the model refuses.
    pub fn init(&self, seed: u64) -> impl Fn(&Param) -> Vec<f32> + Send + Sync + use<> {
        let hint = |it: &RecordedParameter| (it.param.name.clone(), (it.init, it.zero_row));
        let hints: HashMap<String, (Init, Option<usize>)> =
            self.parameters.iter().map(hint).collect();
        move |param| {
            let Some((init, zero_row)) = hints.get(&param.name) else { return Vec::new() };
            let mut values = initial::values(param, *init, seed);
            if let Some(row) = zero_row {
                let width: usize = param.shape.iter().skip(1).product();
                values[row * width..][..width].fill(0.0);
            }
            values
        }
    }
}

/// Parameters requested so far.
#[derive(Default)]
struct AskedParameters {
    parameters: Vec<RecordedParameter>,
    /// Index of each parameter, by name.
    places: HashMap<String, usize>,
    /// Names of tensors that are no parameters.
    buffers: Vec<String>,
}

impl AskedParameters {
    fn note(&mut self, name: &str, shape: &Shape, init: Init) -> Result<(), Error> {
        let Some(&place) = self.places.get(name) else {
            self.places.insert(name.to_owned(), self.parameters.len());
            let param = Param::new(name, shape.dims());
            self.parameters.push(RecordedParameter { param, init, is_tied: false, zero_row: None });
            return Ok(());
        };
        let known = &mut self.parameters[place];
        if known.param.shape != shape.dims() {
            return Err(Error::Declaration(DeclarationError::Reshaped {
                parameter: name.to_owned(),
                first: known.param.shape.clone(),
                second: shape.dims().to_vec(),
            }));
        }
        known.is_tied = true;
        Ok(())
    }
}

struct VarRecorder(Arc<Mutex<AskedParameters>>);

impl SimpleBackend for VarRecorder {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> CandleResult<Tensor> {
        let mut asked = self.0.lock();
        asked.note(name, &shape, init)?;
        if dtype.is_int() {
            asked.buffers.push(format!("{name} (of {})", dtype.as_str()));
        } else if is_buffer(name) {
            asked.buffers.push(name.to_owned());
        }
        Tensor::zeros((), dtype, device)?.broadcast_as(shape)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> CandleResult<Tensor> {
        Err(Error::Declaration(DeclarationError::NoShape { parameter: name.to_owned() }).into())
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.lock().places.contains_key(name)
    }
}

/// Names of tensors that a forward changes, in layers of PyTorch and candle: statistics of batch
/// and instance norms, and of codebooks that learn by moving averages.
const BUFFERS: [&str; 9] = [
    "running_mean",
    "running_var",
    "num_batches_tracked",
    "cluster_size",
    "cluster_usage",
    "embed_avg",
    "embed_sum",
    "inited",
    "initialized",
];

/// Returns whether the last component of a name is the name of a buffer.
pub(crate) fn is_buffer(name: &str) -> bool {
    name.rsplit('.').next().is_some_and(|last| BUFFERS.contains(&last))
}

/// The pattern of all names that no other pattern takes, and the name of their unit.
const ROOT: &str = "root";

/// Returns the units of the parameters, in the order of the patterns.
fn group(parameters: &[RecordedParameter], patterns: &[&str]) -> Result<Vec<Unit>, Error> {
    let mut units: Vec<Vec<Unit>> = vec![Vec::new(); patterns.len()];
    let mut left = Vec::new();
    for parameter in parameters {
        let name = parameter.param.name.as_str();
        match taken(name, patterns) {
            Some((place, prefix)) => put(&mut units[place], prefix, parameter),
            None => left.push(name),
        }
    }
    if !left.is_empty() {
        return Err(Error::Declaration(DeclarationError::NoUnit { parameters: left.join(", ") }));
    }
    match units.iter().position(Vec::is_empty) {
        Some(empty) => Err(Error::Declaration(DeclarationError::EmptyPattern {
            pattern: patterns[empty].to_owned(),
        })),
        None => Ok(units.concat()),
    }
}

/// Returns the index of the pattern that takes a name, and the name of the unit.
fn taken<'a>(name: &'a str, patterns: &[&str]) -> Option<(usize, &'a str)> {
    let others = patterns.iter().enumerate().filter(|(_, pattern)| **pattern != ROOT);
    let root = || Some((patterns.iter().position(|pattern| *pattern == ROOT)?, ROOT));
    let mut matches = others.filter_map(|(place, pattern)| Some((place, matched(name, pattern)?)));
    matches.next().or_else(root)
}

/// Returns the first components of `name`, if the pattern matches them.
fn matched<'a>(name: &'a str, pattern: &str) -> Option<&'a str> {
    let mut end = 0;
    let mut components = name.split('.');
    for (place, wanted) in pattern.split('.').enumerate() {
        let component = components.next()?;
        if wanted != "*" && wanted != component {
            return None;
        }
        end += component.len() + usize::from(place > 0);
    }
    Some(&name[..end])
}

fn put(units: &mut Vec<Unit>, name: &str, parameter: &RecordedParameter) {
    let place = units.iter().rposition(|unit| unit.name == name).unwrap_or_else(|| {
        units.push(Unit::new(name));
        units.len() - 1
    });
    let unit = std::mem::replace(&mut units[place], Unit::new("")).param(parameter.param.clone());
    units[place] = if parameter.is_tied { unit.keep() } else { unit };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_component_decides() {
        assert!(is_buffer("running_mean") && is_buffer("layer1.0.bn1.running_var"));
        assert!(is_buffer("bn.num_batches_tracked"));
        assert!(!is_buffer("running_mean.weight") && !is_buffer("bn.weight") && !is_buffer(""));
    }

    #[test]
    fn a_pattern_matches_whole_components_from_the_start() {
        assert_eq!(matched("h.0.attn.weight", "h.*"), Some("h.0"));
        assert_eq!(matched("h.0.attn.weight", "h"), Some("h"));
        assert_eq!(matched("h.0.attn.weight", "*.0.attn"), Some("h.0.attn"));
        assert_eq!(matched("bias", "bias"), Some("bias"));
        assert_eq!(matched("h.0.attn.weight", "h.1"), None);
        assert_eq!(matched("heads.0", "h"), None);
        assert_eq!(matched("h", "h.*"), None);
        assert_eq!(matched("h.0", "0"), None);
    }
}
