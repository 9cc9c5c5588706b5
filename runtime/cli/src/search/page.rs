//! Writes the result of a search as a page: one self-contained HTML file with drawings in SVG.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use hsdp_comm::Stage;
use hsdp_sharding::ByteCount;
use hsdp_simulator::{
    Error, Found, Lane, Machine, Microbatches, ModelPlacement, Search, Span, StepMemory, Time,
    What, Work, Workload, trace,
};

use super::{Searched, behind, counts, memory_in_words, ties};
use crate::svg::{bar, drawing, escaped, text};

/// Maximum number of drawn microbatches in a step.
const MOST_DRAWN: u64 = 8;

const STYLE: &str = include_str!("page/style.css");

/// Returns the whole page.
///
/// # Errors
/// The errors of a simulation.
pub(super) fn of(searched: &Searched<'_>) -> Result<String, Error> {
    let Searched { options, machine, search, .. } = searched;
    let best = &search.best[0];
    let title = format!("{} on {} ranks of {}", options.model, options.ranks, machine.name);
    let title = escaped(&title);
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n<main>\n<h1>{title}</h1>\n{}\n",
        summary(searched)
    );
    let mut section = |heading: &str, text: &str, content: &str| {
        let _ = write!(page, "<h2>{heading}</h2>\n<p>{text}</p>\n{content}\n");
    };
    section(
        "Meshes",
        "Tokens a second of the fastest step of each mesh, replicas x shards, and number of microbatches, to the error. Where there is no number, nothing fits, or nothing was simulated.",
        &heat_map(search),
    );
    let (text, drawing) = step(best, machine)?;
    section("A step of the first", &text, &drawing);
    section(
        "Memory of a rank",
        "Parts that may peak at different times; the line is the memory that a rank may use.",
        &memory(&best.prediction.memory, searched.memory),
    );
    section("The best", "Each with the options of hsdp simulate that choose it.", &list(searched));
    section("Candidates that do not fit", &unfit(searched), "");
    page.push_str("</main>\n</html>\n");
    Ok(page)
}

/// Draws a step of rank 0 over time, and returns the text beside it.
fn step(found: &Found, machine: &Machine) -> Result<(String, String), Error> {
    let count = found.candidate.microbatches;
    let drawn = count.min(MOST_DRAWN);
    let microbatches = Microbatches::Given(drawn);
    let workload = Workload { microbatches, ..found.workload.clone() };
    let order = workload.order(machine);
    let (timing, spans) = trace(&order, &workload.costs(machine)?)?;
    let part = match workload.plan.divides_state() {
        true => "from the update of the step before to the norm of this one",
        false => "from the beginning of the step to the end of the update",
    };
    let mut text = format!("Rank 0, {part}. Point at a part for its name and its times.");
    if drawn < count {
        let _ = write!(text, " The step has {count} microbatches; one of {drawn} is drawn.");
    }
    Ok((text, time_line(&spans, order.placement, timing.step)))
}

fn summary(searched: &Searched<'_>) -> String {
    let search = &searched.search;
    let best = &search.best[0];
    let prediction = &best.prediction;
    format!(
        "<p class=\"best\"><b>{:.0}</b> tokens a second by mesh <b>{}</b>: a step of {} tokens takes {}, model flops utilisation {:.1} %, memory {}.</p>\n\
         <p><code>{}</code></p>\n<p>{}.</p>\n<p>{}.</p>",
        prediction.tokens_per_second(),
        best.candidate.plan.mesh,
        prediction.tokens,
        prediction.timing.step,
        100.0 * prediction.flops_utilisation(),
        memory_in_words(best),
        escaped(&searched.options_of(best)),
        escaped(&ties(searched)),
        escaped(&counts(search)),
    )
}

fn list(searched: &Searched<'_>) -> String {
    let search = &searched.search;
    let mut rows = String::new();
    for found in &search.best {
        let prediction = &found.prediction;
        let _ = writeln!(
            rows,
            "<tr><td>{}</td><td>{}</td><td>{:.0}</td><td>{}</td><td>{}</td><td><code>{}</code></td></tr>",
            behind(found, search.fastest),
            memory_in_words(found),
            prediction.tokens_per_second(),
            prediction.tokens,
            prediction.timing.step,
            escaped(&searched.options_of(found)),
        );
    }
    format!(
        "<div class=\"wide\"><table>\n<tr><th>behind</th><th>memory</th><th>tokens/s</th><th>tokens</th><th>step</th><th>options</th></tr>\n{rows}</table></div>"
    )
}

fn unfit(searched: &Searched<'_>) -> String {
    let counts = searched.search.unfit.iter().map(|(unfit, count)| format!("{count}: {unfit}."));
    let counts: Vec<String> = counts.collect();
    if counts.is_empty() { "All candidates fit.".to_owned() } else { counts.join("<br>\n") }
}

const CELL: (f64, f64) = (84.0, 34.0);
const MAP_LEFT: f64 = 110.0;
const MAP_TOP: f64 = 44.0;

/// Draws the map, with a column for each mesh and a row for each number of microbatches.
fn heat_map(search: &Search) -> String {
    let meshes: BTreeSet<(usize, usize)> = search.cells.keys().map(|(r, s, _)| (*r, *s)).collect();
    let counts: BTreeSet<u64> = search.cells.keys().map(|(.., count)| *count).collect();
    let fastest = search.cells.values().copied().fold(0.0, f64::max);
    let place = |column: usize, row: usize| {
        (MAP_LEFT + CELL.0 * column as f64, MAP_TOP + CELL.1 * row as f64)
    };
    let mut content = text(MAP_LEFT - 10.0, 16.0, "end", "mesh");
    content += &text(MAP_LEFT - 10.0, MAP_TOP - 8.0, "end", "microbatches");
    for (column, (replicas, shards)) in meshes.iter().enumerate() {
        let (x, _) = place(column, 0);
        content += &text(x + CELL.0 / 2.0, 16.0, "middle", &format!("{replicas}x{shards}"));
        for (row, count) in counts.iter().enumerate() {
            let speed = search.cells.get(&(*replicas, *shards, *count));
            let (x, y) = place(column, row);
            content += &cell(x, y, speed.copied(), fastest);
        }
    }
    for (row, count) in counts.iter().enumerate() {
        let (_, y) = place(0, row);
        content += &text(MAP_LEFT - 10.0, y + 22.0, "end", &count.to_string());
    }
    let size = place(meshes.len(), counts.len());
    drawing(size.0 + 2.0, size.1 + 2.0, "Tokens a second by mesh and microbatches", &content)
}

/// Draws a cell. A faster step has a stronger color.
fn cell(x: f64, y: f64, speed: Option<f64>, fastest: f64) -> String {
    let width = CELL.0 - 3.0;
    let height = CELL.1 - 3.0;
    let Some(speed) = speed else {
        return format!(
            "<rect x=\"{x:.0}\" y=\"{y:.0}\" width=\"{width:.0}\" height=\"{height:.0}\" class=\"none\"/>\n"
        );
    };
    let part = speed / fastest;
    let words = short(speed);
    let strength = 0.06 + 0.94 * part * part;
    let class = if strength > 0.75 { "on-strong" } else { "on-pale" };
    format!(
        "<g><title>{}</title><rect x=\"{x:.0}\" y=\"{y:.0}\" width=\"{width:.0}\" height=\"{height:.0}\" class=\"heat\" style=\"fill-opacity:{strength:.3}\"/>\
         <text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"middle\" class=\"{class}\">{words}</text></g>\n",
        escaped(&format!("{speed:.0} tokens/s, {:.1} % of the fastest", 100.0 * part)),
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

const WIDTH: f64 = 1100.0;
const MEMORY_LEFT: f64 = 150.0;
const MEMORY_RIGHT: f64 = 130.0;
const MEMORY_ROW: f64 = 26.0;

/// Draws a bar for each category, and one for all, with a line at the memory that a rank may use.
fn memory(memory: &StepMemory, limit: ByteCount) -> String {
    let parts = memory.parts().into_iter().filter(|(_, bytes)| bytes.get() > 0);
    let rows: Vec<(&str, ByteCount)> = parts.chain([("all", memory.total())]).collect();
    let most = limit.get().max(memory.total().get()).max(1) as f64;
    let scale = (WIDTH - MEMORY_LEFT - MEMORY_RIGHT) / most;
    let mut content = String::new();
    for (row, (name, bytes)) in rows.iter().enumerate() {
        let y = MEMORY_ROW * row as f64;
        let width = bytes.get() as f64 * scale;
        let class = if *name == "all" { "all" } else { "part" };
        content += &text(MEMORY_LEFT - 10.0, y + 16.0, "end", name);
        content += &bar(
            [MEMORY_LEFT, y + 3.0, width, MEMORY_ROW - 8.0],
            class,
            &format!("{name}: {bytes}"),
        );
        content += &text(MEMORY_LEFT + width + 8.0, y + 16.0, "start", &bytes.to_string());
    }
    let x = MEMORY_LEFT + limit.get() as f64 * scale;
    let bottom = MEMORY_ROW * rows.len() as f64;
    content += &format!(
        "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"0\" y2=\"{bottom:.1}\" class=\"limit\"/>\n"
    );
    content += &text(x, bottom + 14.0, "middle", &limit.to_string());
    drawing(WIDTH, bottom + 20.0, "Memory of a rank by category", &content)
}

const LINE_LEFT: f64 = 110.0;
const LINE_ROW: f64 = 34.0;
const LINE_TOP: f64 = 8.0;

/// Draws the lanes of the first color, without uses that take no time.
fn time_line(spans: &[Span], placement: ModelPlacement, step: Time) -> String {
    let mut lanes: BTreeMap<Lane, Vec<&Span>> = BTreeMap::new();
    let drawn =
        |span: &&Span| span.color == 0 && kind(span.what).is_some() && span.begins < span.ends;
    for span in spans.iter().filter(drawn) {
        lanes.entry(span.lane).or_default().push(span);
    }
    let scale = (WIDTH - LINE_LEFT) / step.seconds().max(f64::MIN_POSITIVE);
    let mut content = String::new();
    for (row, (lane, spans)) in lanes.iter().enumerate() {
        let y = LINE_TOP + LINE_ROW * row as f64;
        // A thread that is drawn computes.
        let name = if *lane == Lane::Host { "computation" } else { lane.name(placement) };
        content += &text(LINE_LEFT - 10.0, y + 19.0, "end", name);
        for (begins, ends, what) in merged(spans, step) {
            let (class, word) = kind(what).unwrap_or(("", ""));
            let x = LINE_LEFT + begins.seconds() * scale;
            let width = (ends.saturating_sub(begins)).seconds() * scale;
            content += &bar(
                [x, y, width.max(0.3), LINE_ROW - 8.0],
                class,
                &format!("{word}, {begins} to {ends}"),
            );
        }
    }
    let bottom = LINE_TOP + LINE_ROW * lanes.len() as f64;
    for tick in 0..=4u32 {
        let part = f64::from(tick) / 4.0;
        let at = Time::from_seconds(step.seconds() * part).unwrap_or(Time::ZERO);
        let anchor = ["start", "middle", "middle", "middle", "end"][tick as usize];
        content +=
            &text(LINE_LEFT + (WIDTH - LINE_LEFT) * part, bottom + 14.0, anchor, &at.to_string());
    }
    content += &legend(bottom + 40.0);
    drawing(WIDTH, bottom + 50.0, "Time line of a step", &content)
}

/// Merges neighbors of one kind if the gap between them is too small to see.
fn merged(spans: &[&Span], step: Time) -> Vec<(Time, Time, What)> {
    let gap = step.picoseconds() / 20_000;
    let mut spans = spans.to_vec();
    spans.sort_by_key(|span| (span.begins, span.ends));
    let mut merged: Vec<(Time, Time, What)> = Vec::new();
    for span in spans {
        match merged.last_mut() {
            Some((_, ends, what))
                if kind(*what) == kind(span.what)
                    && span.begins.saturating_sub(*ends).picoseconds() < gap =>
            {
                *ends = span.ends.max(*ends);
            }
            _ => merged.push((span.begins, span.ends, span.what)),
        }
    }
    merged
}

const KINDS: [(&str, &str); 9] = [
    ("forward", "forward"),
    ("backward", "backward"),
    ("optimizer", "norm and update"),
    ("sums", "sums"),
    ("gather", "gathers"),
    ("reduce", "reduce-scatters"),
    ("all-reduce", "all-reduces"),
    ("exchange", "exchanges"),
    ("statistics", "statistics"),
];

/// Returns the class and the words of a use. `None` for uses that are not drawn.
fn kind(what: What) -> Option<(&'static str, &'static str)> {
    let index = match what {
        What::Work(Work::Forward(_) | Work::Loss) => 0,
        What::Work(Work::Backward(_)) => 1,
        What::Work(Work::Norm | Work::Update | Work::UpdateSlice(_)) => 2,
        What::Work(Work::Accumulate(_) | Work::Fold(_)) => 3,
        What::Operation(operation) => match operation.stage {
            Stage::Gather | Stage::GatherSlices => 4,
            Stage::Reduce | Stage::ScatterSums => 5,
            Stage::AllReduce => 6,
            Stage::Statistics => 8,
            _ => 7,
        },
        What::Launch(_) | What::Issue(_) | What::Wait(_) => return None,
    };
    Some(KINDS[index])
}

fn legend(y: f64) -> String {
    let mut legend = String::new();
    let mut x = LINE_LEFT;
    for (class, words) in KINDS {
        legend += &bar([x, y - 11.0, 12.0, 12.0], class, words);
        legend += &text(x + 17.0, y, "start", words);
        x += 38.0 + 7.0 * words.len() as f64;
    }
    legend
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
