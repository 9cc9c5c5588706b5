//! The printed report: a table in Markdown.

use std::time::Duration;

use hsdp::ByteCount;
use hsdp_train::print;
use hsdp_train::stdout::PrintError;

use crate::measure::Row;
use crate::options::Options;

pub(crate) fn show(options: &Options, rows: &[Row]) -> Result<(), PrintError> {
    let Options { mesh, units, numel, rounds, .. } = options;
    print(format_args!(
        "local, mesh {mesh}, {units} units of {numel} parameters in f32, f32 wire; median of {rounds} steps"
    ))?;
    print(format_args!("slow links, injected: {}", options.words()))?;
    print("")?;
    print(
        "| microbatches | mode | step, memory | step, slow links | calls | received along a row | along a column | partial | grad_full |",
    )?;
    print("|---|---|---|---|---|---|---|---|---|")?;
    rows.iter().try_for_each(|row| print(line(row)))
}

fn line(row: &Row) -> String {
    let Row { mode, microbatches, traffic, .. } = row;
    let [memory, slow] = [row.memory, row.slow].map(ms);
    let along_row = mb(traffic.all_gather.bytes + traffic.reduce_scatter.bytes);
    let over_replicas = traffic.all_reduce + traffic.scatter_sums + traffic.gather_slices;
    let along_column = mb(over_replicas.bytes);
    let [partial, grad_full] = [row.partial, row.grad_full].map(mb);
    let calls = traffic.total().calls;
    format!(
        "| {microbatches} | {mode} | {memory} | {slow} | {calls} | {along_row} | {along_column} | {partial} | {grad_full} |"
    )
}

fn ms(time: Duration) -> String {
    format!("{:.0} ms", time.as_secs_f64() * 1e3)
}

fn mb(bytes: ByteCount) -> String {
    format!("{:.0} MB", bytes.get() as f64 / 1e6)
}
