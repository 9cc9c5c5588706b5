//! Draws meshes by microbatches, in shades of their speed.

use std::collections::BTreeSet;

use hsdp_simulator::Search;

use super::svg::{drawing, text};
use crate::escape;

const CELL: (f64, f64) = (84.0, 34.0);
const LEFT: f64 = 110.0;
const TOP: f64 = 44.0;

/// Draws the map, with a column for each mesh and a row for each number of microbatches.
pub(super) fn of(search: &Search) -> String {
    let meshes: BTreeSet<(usize, usize)> = search.cells.keys().map(|(r, s, _)| (*r, *s)).collect();
    let counts: BTreeSet<u64> = search.cells.keys().map(|(.., count)| *count).collect();
    let fastest = search.cells.values().copied().fold(0.0, f64::max);
    let place =
        |column: usize, row: usize| (LEFT + CELL.0 * column as f64, TOP + CELL.1 * row as f64);
    let mut content = text((LEFT - 10.0, 16.0), "end", "mesh");
    content += &text((LEFT - 10.0, TOP - 8.0), "end", "microbatches");
    for (column, (replicas, shards)) in meshes.iter().enumerate() {
        let (x, _) = place(column, 0);
        content += &text((x + CELL.0 / 2.0, 16.0), "middle", &format!("{replicas}x{shards}"));
        for (row, count) in counts.iter().enumerate() {
            let speed = search.cells.get(&(*replicas, *shards, *count));
            content += &cell(place(column, row), speed.copied(), fastest);
        }
    }
    for (row, count) in counts.iter().enumerate() {
        let (_, y) = place(0, row);
        content += &text((LEFT - 10.0, y + 22.0), "end", &count.to_string());
    }
    let size = place(meshes.len(), counts.len());
    drawing((size.0 + 2.0, size.1 + 2.0), "Tokens a second by mesh and microbatches", &content)
}

/// Draws a cell. A faster step has a stronger color.
fn cell((x, y): (f64, f64), speed: Option<f64>, fastest: f64) -> String {
    let (width, height) = (CELL.0 - 3.0, CELL.1 - 3.0);
    let Some(speed) = speed else {
        return format!(
            "<rect x=\"{x:.0}\" y=\"{y:.0}\" width=\"{width:.0}\" height=\"{height:.0}\" class=\"none\"/>\n"
        );
    };
    let part = speed / fastest;
    let (words, strength) = (short(speed), 0.06 + 0.94 * part * part);
    let class = if strength > 0.75 { "on-strong" } else { "on-pale" };
    format!(
        "<g><title>{}</title><rect x=\"{x:.0}\" y=\"{y:.0}\" width=\"{width:.0}\" height=\"{height:.0}\" class=\"heat\" style=\"fill-opacity:{strength:.3}\"/>\
         <text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"middle\" class=\"{class}\">{words}</text></g>\n",
        escape::text(&format!("{speed:.0} tokens/s, {:.1} % of the fastest", 100.0 * part)),
        x + width / 2.0,
        y + 20.0,
    )
}

/// Formats a number in at most five characters: `1234`, `12.3k`, `1.30M`.
fn short(number: f64) -> String {
    match number {
        ..1e4 => format!("{number:.0}"),
        ..1e5 => format!("{:.1}k", number / 1e3),
        ..1e6 => format!("{:.0}k", number / 1e3),
        ..1e7 => format!("{:.2}M", number / 1e6),
        _ => format!("{:.0}M", number / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::short;

    #[test]
    fn numbers_are_short() {
        let numbers = [0.4, 1234.0, 12_345.0, 123_456.0, 1_299_423.0, 12_994_230.0].map(short);
        assert_eq!(numbers, ["0", "1234", "12.3k", "123k", "1.30M", "13M"]);
    }
}
