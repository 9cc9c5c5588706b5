//! The end of a run: the printed report, and `summary.json`.

use comfy_table::Table;
use hsdp::ByteCount;
use hsdp::sharding::Role;
use serde_json::{Value, json};

use super::inputs::Inputs;
use super::shared::failure::Failure;
use super::shared::messages::messages_summary;
use super::shared::tables::{
    applied, exactness, losses, memory_table, rank_summary, table, traffic_table,
};
use super::train::Run;

/// Prints tables to stdout. A resumed run that had no step to make is one line.
pub(crate) fn print(inputs: &Inputs, run: &Run) -> Result<(), Failure> {
    let text = match run.records.is_empty() {
        true => format!("all {} steps are made\n", inputs.steps),
        false => text(inputs, run),
    };
    let text = match (&inputs.export, &run.parameters) {
        (Some(export), Some(_)) => format!("{text}{}\n", export.in_words(inputs)),
        _ => text,
    };
    hsdp_train::print(text).map_err(Failure::Output)
}

fn text(inputs: &Inputs, run: &Run) -> String {
    let costs = &run.costs[0];
    let traffic = traffic_table(costs, run.records.len());
    let mut memory = memory_table(costs);
    memory.add_row([activations(inputs), String::new(), run.measured.activations.to_string()]);
    format!("{}\n\n{traffic}\n{}\n\n{memory}\n", overview(inputs, run), exactness(&run.costs))
}

/// The name of candle's tensors in the table of memory.
fn activations(inputs: &Inputs) -> String {
    match inputs.options.recompute {
        true => "activations, recomputed".to_owned(),
        false => "activations, kept".to_owned(),
    }
}

fn overview(inputs: &Inputs, run: &Run) -> Table {
    let config = inputs.decoder.config();
    let model = format!(
        "{} blocks, width {}, {} heads, {} for keys and values",
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads
    );
    let [first, last] = losses(&run.records);
    let seconds: f64 = run.records.iter().map(|record| record.seconds).sum();
    let tokens: u64 = run.records.iter().map(|record| record.tokens).sum();
    let parameters = format!("{} in {} units", inputs.spec.numel().0, inputs.spec.units().len());
    let mut rows = vec![["model".to_owned(), model], ["parameters".to_owned(), parameters]];
    if inputs.options.lora.is_some() {
        rows.push(["trained".to_owned(), trained(inputs).to_string()]);
    }
    rows.push(["loss, first step".to_owned(), format!("{first:.4}")]);
    rows.push(["loss, last step".to_owned(), format!("{last:.4}")]);
    for (when, loss) in ["before", "after"].into_iter().zip(run.measured.held_out) {
        rows.extend(loss.map(|loss| [format!("held out, {when}"), format!("{loss:.4}")]));
    }
    if let Some(loss) = run.measured.of_average {
        rows.push(["held out, average of weights".to_owned(), format!("{loss:.4}")]);
    }
    rows.push(["speed".to_owned(), format!("{:.0} tokens/s", tokens as f64 / seconds)]);
    let skipped = run.records.len() - applied(&run.records);
    if skipped > 0 {
        let what = format!("{skipped} steps, in which a gradient overflowed");
        rows.push(["skipped".to_owned(), what]);
    }
    if run.measured.warnings > 0 {
        rows.push(["warnings".to_owned(), run.measured.warnings.to_string()]);
    }
    let steps = format!("{} steps on mesh {}", run.records.len(), inputs.options.run.mesh);
    table(["a run", &steps], rows)
}

/// The number of elements that are trained.
fn trained(inputs: &Inputs) -> usize {
    let params = inputs.spec.params().map(|(_, param)| param);
    params.filter(|param| param.role == Role::Trainable).map(|param| param.numel()).sum()
}

/// The contents of `summary.json`: totals of the run, by rank.
pub(crate) fn summary(inputs: &Inputs, run: &Run) -> Value {
    let options = &inputs.options;
    let [first, last] = losses(&run.records);
    let [before, after] = run.measured.held_out;
    let ranks: Vec<Value> =
        run.costs.iter().enumerate().map(|(rank, costs)| rank_summary(rank, costs)).collect();
    let ByteCount(activations) = run.measured.activations;
    json!({
        "mesh": options.run.mesh.to_string(),
        "steps": run.records.len(),
        "applied": applied(&run.records),
        "microbatches": options.run.microbatches,
        "param_dtype": options.run.param_dtype.to_string(),
        "reduce_dtype": options.run.reduce_dtype.to_string(),
        "accumulation": options.run.accumulation.to_string(),
        "recompute": options.recompute,
        "lora": options.lora,
        "parameters": inputs.spec.numel().0,
        "trained": trained(inputs),
        "units": inputs.spec.units().len(),
        "loss": { "first": first, "last": last },
        "eval_loss_before": before,
        "eval_loss_after": after,
        "eval_loss_average": run.measured.of_average,
        "optimizer": options.optimizer.name(),
        "seconds": run.records.iter().map(|record| record.seconds).sum::<f64>(),
        "warnings": run.measured.warnings,
        "peak_activation_bytes": activations,
        "messages": messages_summary(run.measured.messages),
        "ranks": ranks,
    })
}
