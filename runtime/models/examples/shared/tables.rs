//! Tables of a run: plan against measurement.

use comfy_table::{CellAlignment, Table, presets};
use hsdp::{ByteCount, Flow};
use serde_json::{Value, json};

use super::costs::{self, Compared, Costs};
use super::progress::StepRecord;

/// The collectives of a rank in a step.
pub(crate) fn traffic_table(costs: &Costs, steps: usize) -> Table {
    let a_step = |total: u64| (total / steps as u64).to_string();
    let rows = costs.traffic.iter().map(|(name, Compared { planned, measured })| {
        let [calls_planned, calls] = [planned, measured].map(|flow| a_step(flow.calls));
        let [bytes_planned, bytes] = [planned, measured].map(|flow| a_step(flow.bytes.get()));
        [(*name).to_owned(), calls_planned, calls, bytes_planned, bytes]
    });
    table(["a step of rank 0", "calls planned", "measured", "bytes planned", "measured"], rows)
}

/// Whether the traffic is as planned, in words.
pub(crate) fn exactness(costs: &[Costs]) -> String {
    costs::check_traffic(costs).unwrap_or_else(|failure| failure.to_string())
}

/// The peak memory of a rank by category.
pub(crate) fn memory_table(costs: &Costs) -> Table {
    let used =
        |compared: &Compared<ByteCount>| compared.planned.max(compared.measured) > ByteCount::ZERO;
    let rows =
        costs.memory.iter().filter(|(_, compared)| used(compared)).map(|(category, compared)| {
            let Compared { planned, measured } = compared;
            [category.to_string(), planned.to_string(), measured.to_string()]
        });
    table(["peak memory of rank 0", "planned", "measured"], rows)
}

/// A table with words on the left and numbers on the right.
pub(crate) fn table<const COLUMNS: usize>(
    header: [&str; COLUMNS],
    rows: impl IntoIterator<Item = [String; COLUMNS]>,
) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header(header).add_rows(rows);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// The totals of a rank, for `summary.json`.
pub(crate) fn rank_summary(rank: usize, costs: &Costs) -> Value {
    let flow = |flow: Flow| json!({ "calls": flow.calls, "bytes": flow.bytes.get() });
    let traffic = costs.traffic.iter().map(|(name, compared)| {
        let sides =
            json!({ "planned": flow(compared.planned), "measured": flow(compared.measured) });
        ((*name).to_owned(), sides)
    });
    let memory = costs.memory.iter().map(|(category, compared)| {
        let sides =
            json!({ "planned": compared.planned.get(), "measured": compared.measured.get() });
        (category.to_string(), sides)
    });
    json!({
        "rank": rank,
        "collectives": traffic.collect::<serde_json::Map<_, _>>(),
        "peak_memory_bytes": memory.collect::<serde_json::Map<_, _>>(),
    })
}

/// The losses of the first and of the last step.
pub(crate) fn losses(records: &[StepRecord]) -> [f64; 2] {
    [records.first(), records.last()].map(|record| record.map_or(f64::NAN, |record| record.loss))
}

/// Steps that have updated the parameters.
pub(crate) fn applied(records: &[StepRecord]) -> usize {
    records.iter().filter(|record| record.applied).count()
}
