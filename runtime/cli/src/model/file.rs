//! Reads models from files in the format of `PLAN.md`.

use hsdp_sharding::{DType, Param, Unit};
use hsdp_simulator::{AttentionScores, AttentionShape};
use serde::Deserialize;

use super::Model;

/// Maximum number of units, parameters, declared matrices, dims and ties of a model, and of bytes
/// in a name.
const MAX_UNITS: usize = 10_000;
const MAX_PARAMS: usize = 200_000;
const MAX_MATRICES: usize = 200_000;
const MAX_DIMS: usize = 16;
const MAX_TIES: usize = 1000;
const MAX_NAME: usize = 256;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelEntry {
    units: Vec<UnitEntry>,
    #[serde(default)]
    ties: Vec<TieEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UnitEntry {
    name: String,
    #[serde(default)]
    keep: bool,
    compute_dtype: Option<DType>,
    params: Vec<ParamEntry>,
    #[serde(default)]
    batch_norms: Vec<BatchNormEntry>,
    attention: Option<AttentionEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BatchNormEntry {
    name: String,
    channels: usize,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct AttentionEntry {
    heads: usize,
    size: usize,
    window: Option<usize>,
    #[serde(default)]
    stored: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ParamEntry {
    name: String,
    shape: Vec<usize>,
    #[serde(default)]
    frozen: bool,
    rows: Option<usize>,
    blocks: Option<usize>,
    matrices: Option<[usize; 3]>,
    #[serde(default)]
    lookup: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TieEntry {
    name: String,
    to: String,
}

/// Reads the text of a model. The plan checks the rest, such as names that occur twice.
///
/// # Errors
/// A text of one line, with the place in the text.
pub(super) fn read(text: &str) -> Result<Model, String> {
    let mut json = serde_json::Deserializer::from_str(text);
    let model: ModelEntry = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let place = error.path().to_string();
        let problem = error.into_inner();
        // A question mark stands for an unknown place.
        let is_known = !matches!(&*place, "." | "?");
        if is_known { format!("{place}: {problem}") } else { problem.to_string() }
    })?;
    json.end().map_err(|error| error.to_string())?;
    check(&model)?;
    Ok(made_of(model))
}

/// Checks limits that the library does not have, or would take long to check.
fn check(model: &ModelEntry) -> Result<(), String> {
    at_most("units", model.units.len(), MAX_UNITS)?;
    at_most("ties", model.ties.len(), MAX_TIES)?;
    // A batch norm has two parameters.
    let params = |unit: &UnitEntry| unit.params.len() + 2 * unit.batch_norms.len();
    at_most("parameters", model.units.iter().map(params).sum(), MAX_PARAMS)?;
    let matrices = model.units.iter().flat_map(|unit| &unit.params).filter_map(|it| it.matrices);
    let matrices = matrices.fold(0, |sum: usize, [count, ..]| sum.saturating_add(count));
    at_most("matrices", matrices, MAX_MATRICES)?;
    for (index, unit) in model.units.iter().enumerate() {
        check_name(&format!("units[{index}]"), &unit.name)?;
        if let Some(AttentionEntry { window: Some(_), stored: true, .. }) = unit.attention {
            let name = &unit.name;
            return Err(format!(
                "units[{index}].attention: that of unit `{name}` has both `window` and `stored`; at \
                 most one is possible"
            ));
        }
        for (slot, param) in unit.params.iter().enumerate() {
            let place = format!("units[{index}].params[{slot}]");
            check_name(&place, &param.name)?;
            check_shape(&place, param)?;
            check_granularity(&place, param)?;
        }
        for (norm, entry) in unit.batch_norms.iter().enumerate() {
            check_name(&format!("units[{index}].batch_norms[{norm}]"), &entry.name)?;
        }
    }
    for (index, tie) in model.ties.iter().enumerate() {
        check_name(&format!("ties[{index}]"), &tie.name)?;
    }
    Ok(())
}

fn at_most(what: &str, count: usize, most: usize) -> Result<(), String> {
    if count <= most { Ok(()) } else { Err(format!("{count} {what}; at most {most} are planned")) }
}

fn check_name(place: &str, name: &str) -> Result<(), String> {
    let bytes = name.len();
    if name.is_empty() || bytes > MAX_NAME {
        return Err(format!("{place}.name: it has {bytes} bytes; 1 to {MAX_NAME} are allowed"));
    }
    match name.chars().find(|character| character.is_control()) {
        Some(character) => {
            Err(format!("{place}.name: {name:?} has the control character {character:?}"))
        }
        None => Ok(()),
    }
}

/// Checks the number and the sizes of dims. The layout multiplies sizes with saturation, and
/// refuses saturated products.
fn check_shape(place: &str, param: &ParamEntry) -> Result<(), String> {
    let dims = param.shape.len();
    if dims > MAX_DIMS {
        return Err(format!("{place}.shape: {dims} dims; at most {MAX_DIMS} are planned"));
    }
    match param.shape.iter().position(|size| *size == 0) {
        Some(dim) => {
            Err(format!("{place}.shape[{dim}]: parameter `{}` has a dim of size 0", param.name))
        }
        None => Ok(()),
    }
}

fn check_granularity(place: &str, param: &ParamEntry) -> Result<(), String> {
    match (param.rows, param.blocks) {
        (Some(_), Some(_)) => Err(format!(
            "{place}: parameter `{}` has both `rows` and `blocks`; at most one is possible",
            param.name
        )),
        _ => Ok(()),
    }
}

fn made_of(entry: ModelEntry) -> Model {
    let mut model = Model::default();
    for entry in entry.units {
        let attention = entry.attention.map(attention);
        model.attentions.extend(attention.map(|it| (entry.name.clone(), it)));
        let lookups = entry.params.iter().filter(|param| param.lookup);
        model.lookups.extend(lookups.map(|param| param.name.clone()));
        let params = entry.params.into_iter().map(param);
        let unit = params.fold(Unit::new(entry.name), Unit::param);
        let unit =
            entry.batch_norms.iter().fold(unit, |unit, it| unit.batch_norm(&it.name, it.channels));
        let unit = entry.compute_dtype.into_iter().fold(unit, Unit::compute_in);
        model.spec = model.spec.unit(if entry.keep { unit.keep() } else { unit });
    }
    model.spec = entry.ties.into_iter().fold(model.spec, |spec, tie| spec.tie(tie.name, tie.to));
    model
}

fn attention(entry: AttentionEntry) -> AttentionShape {
    let scores = match (entry.stored, entry.window) {
        (true, _) => AttentionScores::Stored,
        (false, None) => AttentionScores::Fused,
        (false, Some(window)) => AttentionScores::Window(window),
    };
    AttentionShape { heads: entry.heads, size: entry.size, scores }
}

fn param(entry: ParamEntry) -> Param {
    let param = Param::new(entry.name, entry.shape);
    let param = if entry.frozen { param.frozen() } else { param };
    let param = match (entry.rows, entry.blocks) {
        (Some(rows), _) => param.rows(rows),
        (None, Some(blocks)) => param.blocks(blocks),
        (None, None) => param,
    };
    match entry.matrices {
        Some([count, rows, columns]) => param.matrices(count, rows, columns),
        None => param,
    }
}
