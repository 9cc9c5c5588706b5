//! The result of a search as text.

use std::fmt::Write as _;

use hsdp_program::stderr::in_one_line;
use hsdp_simulator::{Found, Search};

use super::Searched;

/// The list of the best, each with the options that choose it, and the counts of the others.
pub(super) fn text(searched: &Searched<'_>) -> String {
    let Searched { options, machine, memory, search } = searched;
    let mut text = format!(
        "{} on {} ranks of {}, {memory} a rank: {} candidates, of which {} do not fit; {} were simulated, and no other of these is faster",
        in_one_line(&options.model),
        options.ranks,
        in_one_line(&machine.name),
        search.candidates,
        search.unfit.values().sum::<u64>(),
        search.simulated,
    );
    for (unfit, count) in &search.unfit {
        let _ = write!(text, "\n  {count} candidates: {unfit}");
    }
    for (index, found) in search.best.iter().enumerate() {
        let _ = write!(text, "\n{}. {}", index + 1, line(found, &search.best[0]));
    }
    text
}

/// How far a step is behind the fastest, in percent of its tokens a second.
pub(super) fn distance(found: &Found, fastest: &Found) -> f64 {
    let [speed, fastest] = [found, fastest].map(|it| it.prediction.tokens_per_second());
    100.0 * (1.0 - speed / fastest)
}

fn line(found: &Found, fastest: &Found) -> String {
    let Found { candidate, prediction, .. } = found;
    let (speed, distance) = (prediction.tokens_per_second(), distance(found, fastest));
    let behind = if distance > 0.0 { format!(", {distance:.2} % behind") } else { String::new() };
    format!(
        "{speed:.0} tokens/s{behind}, utilisation {:.1} %, a step {}, memory {}\n   {candidate}",
        100.0 * prediction.flops_utilisation(),
        prediction.timing.step,
        prediction.memory.total(),
    )
}

/// The error of a search in which nothing fits.
pub(super) fn nothing_fits(model: &str, search: &Search) -> String {
    let reasons = search.unfit.iter().map(|(unfit, count)| format!("{count}: {unfit}"));
    let reasons: Vec<String> = reasons.collect();
    format!("{model} fits no mesh: of {} candidates {}", search.candidates, reasons.join("; "))
}
