//! Writes the result of a search as a page: one self-contained HTML file with drawings in SVG.

mod heat_map;
mod memory;
mod svg;
mod time_line;

use std::fmt::Write as _;

use hsdp_simulator::{Error, Found, Machine, Microbatches, Workload, trace};

use super::Searched;
use super::report::{behind, counts, memory as memory_of, ties};
use crate::escape;

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
    let title = escape::text(&title);
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
        &heat_map::of(search),
    );
    let (text, drawing) = step(best, machine)?;
    section("A step of the first", &text, &drawing);
    section(
        "Memory of a rank",
        "Parts that may peak at different times; the line is the memory that a rank may use.",
        &memory::of(&best.prediction.memory, searched.memory),
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
    let (timing, spans) = trace(&workload.orders(machine), &workload.costs(machine)?)?;
    let mut text = "Rank 0, from the beginning of the step to the end of the update. Point at a part for its name and its times.".to_owned();
    if drawn < count {
        let _ = write!(text, " The step has {count} microbatches; one of {drawn} is drawn.");
    }
    Ok((text, time_line::of(&spans, timing.step)))
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
        memory_of(best),
        escape::text(&searched.options_of(best)),
        escape::text(&ties(searched)),
        escape::text(&counts(search)),
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
            memory_of(found),
            prediction.tokens_per_second(),
            prediction.tokens,
            prediction.timing.step,
            escape::text(&searched.options_of(found)),
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
