//! Formats the result of a search as text.

use std::fmt::Write as _;

use hsdp_sharding::ByteCount;
use hsdp_simulator::{Found, Search, StatedError};
use hsdp_train::stderr::in_one_line;

use super::Searched;

/// Returns the counts of candidates, and the list of the best, each with the options that choose
/// it.
pub(super) fn text(searched: &Searched<'_>) -> String {
    let Searched { options, machine, memory, search, .. } = searched;
    let mut text = format!(
        "{} on {} ranks of {}, {memory} a rank: {}",
        in_one_line(&options.model),
        options.ranks,
        in_one_line(&machine.name),
        counts(search)
    );
    for (unfit, count) in &search.unfit {
        let _ = write!(text, "\n  {count} candidates: {unfit}");
    }
    let _ = write!(text, "\n{}", ties(searched));
    for (index, found) in search.best.iter().enumerate() {
        let _ = write!(text, "\n{}. {}", index + 1, line(searched, found));
    }
    text
}

/// Describes how many candidates there are, and why most are not in the list.
pub(super) fn counts(search: &Search) -> String {
    let unfit = search.unfit.values().sum::<u64>();
    let Search { candidates, simulated, over_budget, best, .. } = search;
    let mut text = format!(
        "{candidates} candidates, of which {unfit} do not fit; {simulated} were simulated, and the \
         {} that fit and are not listed are slower, or tie with a listed one of their mesh and \
         need no less memory, or come later in the order of the list",
        candidates - unfit - best.len() as u64
    );
    if *over_budget > 0 {
        let _ = write!(
            text,
            ", or are among {over_budget} that a search has no time to simulate: search fewer \
             ranks, or a smaller model"
        );
    }
    text
}

/// Describes the error within which steps tie, and the numbers that are compared.
pub(super) fn ties(searched: &Searched<'_>) -> String {
    let Searched { options, search, .. } = searched;
    let StatedError { relative, of } = search.error;
    let mut text = format!(
        "the fastest has {:.0} tokens/s; predictions for {of} have errors of up to {:.1} %, so steps that differ by less tie, and are in the order of their memory",
        search.fastest,
        100.0 * relative
    );
    if options.batch_tokens.number().is_none() {
        text.push_str("; steps have different numbers of tokens");
    }
    text
}

/// Describes whether a step ties with the fastest, or how many percent of the tokens a second it is
/// behind.
pub(super) fn behind(found: &Found, fastest: f64) -> String {
    match found.band {
        0 => "tie".to_owned(),
        _ => format!("{:.0} % behind", 100.0 * distance(found, fastest)),
    }
}

/// Returns the part of the fastest speed that a step lacks.
pub(super) fn distance(found: &Found, fastest: f64) -> f64 {
    1.0 - found.prediction.tokens_per_second() / fastest
}

/// Describes the memory of a rank, and its part in the host's memory.
pub(super) fn memory(found: &Found) -> String {
    let memory = &found.prediction.memory;
    match memory.offloaded.total() {
        ByteCount(0) => memory.total().to_string(),
        host => format!("{} and {host} of the host's", memory.total()),
    }
}

fn line(searched: &Searched<'_>, found: &Found) -> String {
    let prediction = &found.prediction;
    format!(
        "{}: memory {}, {:.0} tokens/s, utilisation {:.1} %, a step of {} tokens {}\n   {}",
        behind(found, searched.search.fastest),
        memory(found),
        prediction.tokens_per_second(),
        100.0 * prediction.flops_utilisation(),
        prediction.tokens,
        prediction.timing.step,
        searched.options_of(found),
    )
}

/// Returns the error of a search in which nothing fits.
pub(super) fn nothing_fits(model: &str, search: &Search) -> String {
    let reasons = search.unfit.iter().map(|(unfit, count)| format!("{count}: {unfit}"));
    let reasons: Vec<String> = reasons.collect();
    format!("{model} fits no mesh: of {} candidates {}", search.candidates, reasons.join("; "))
}
