//! The text that ranks exchange where they differ: one line for each option of the model, each unit
//! and each parameter.

use hsdp_sharding::{
    AfterForward, BufferRule, Granularity, ModelSpec, Param, Role, State, Statistics,
};

use crate::options::ModelOptions;
use crate::options::digest;
use crate::options::precision::Precision;

impl ModelOptions {
    /// Returns a digest of the options, which ranks compare.
    pub(crate) fn digest(&self) -> u64 {
        digest::of_lines(&of_options(self))
    }
}

/// Returns the options, one line each. Every option that ranks must have in common has a line.
pub(crate) fn of_options(options: &ModelOptions) -> Vec<String> {
    // The fields are named, so that an option that is added later is not forgotten here.
    let ModelOptions {
        mesh,
        // Ranks compare it by itself, with the model's number.
        name: _,
        placement,
        precision: Precision { parameters, wire, output },
        accumulation,
        prefetch,
        full_copies,
        state,
        objective,
        loss_scaling,
        unused,
        non_finite,
        uneven,
        order,
        compare_replicas,
    } = options;
    let output = output.map_or("as it is", |dtype| dtype.name());
    let compared = match compare_replicas {
        Some(steps) => format!("compare_replicas every {steps} steps"),
        None => "compare_replicas never".to_owned(),
    };
    vec![
        format!("mesh {mesh}"),
        format!("placement {placement}"),
        format!("precision.parameters {parameters}"),
        format!("precision.wire {wire}"),
        format!("precision.output {output}"),
        format!("accumulation {accumulation}"),
        format!("prefetch {prefetch}"),
        format!("full_copies {full_copies}"),
        format!("state {state}"),
        format!("objective {objective:?}"),
        format!("loss_scaling {loss_scaling:?}"),
        format!("unused {unused:?}"),
        format!("non_finite {non_finite:?}"),
        format!("uneven {uneven:?}"),
        format!("order {order:?}"),
        compared,
    ]
}

/// Returns the settings, the units, their parameters, buffers and statistics, one line each, and
/// the ties.
pub(crate) fn of_model(spec: &ModelSpec) -> Vec<String> {
    let mut lines: Vec<String> =
        spec.settings().map(|(name, value)| format!("{name} {value}")).collect();
    for (index, unit) in spec.units().iter().enumerate() {
        let kept = match unit.after_forward {
            AfterForward::Reshard => "",
            AfterForward::Keep => ", kept after the forward",
            AfterForward::Discard => ", for the forward alone",
        };
        let compute = unit.compute_dtype.map(|dtype| format!(", computes in {dtype}"));
        let compute = compute.unwrap_or_default();
        lines.push(format!("unit {index} `{}`{kept}{compute}", unit.name));
        lines.extend(unit.params.iter().map(|param| of_param(index, param)));
        lines.extend(unit.buffers.iter().map(|buffer| of_buffer(index, buffer)));
        let statistics = unit.statistics.iter();
        lines.extend(statistics.map(|Statistics { name, channels }| {
            format!("statistics `{name}` of {channels} channels in unit {index}")
        }));
    }
    lines.extend(spec.ties().map(|(alias, target)| format!("`{alias}` tied to `{target}`")));
    lines
}

fn of_param(unit: usize, param: &Param) -> String {
    let role = match param.role {
        Role::Trainable => "",
        Role::Frozen => ", frozen",
    };
    let stored = param.stored.map_or_else(String::new, |dtype| format!(", stored in {dtype}"));
    let pieces = match param.granularity {
        Granularity::Element => String::new(),
        Granularity::Rows(rows) => format!(", cut at every {rows} rows"),
        Granularity::Blocks(elements) => format!(", cut at every {elements} elements"),
    };
    let state = match (param.role, param.state) {
        (Role::Trainable, State::EightBit { block }) => {
            format!(", with 8-bit state in blocks of {block}")
        }
        _ => String::new(),
    };
    let view = param.view.map_or_else(String::new, |view| format!(", as matrices {view}"));
    format!(
        "parameter `{}` {:?}{role}{stored}{pieces}{state}{view} in unit {unit}",
        param.name, param.shape
    )
}

fn of_buffer(unit: usize, buffer: &Param) -> String {
    let rule = match buffer.buffer {
        Some(BufferRule::Averaged) => ", averaged over the ranks",
        Some(BufferRule::Equal) | None => "",
    };
    format!("buffer `{}` {:?}{rule} in unit {unit}", buffer.name, buffer.shape)
}
