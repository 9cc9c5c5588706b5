//! Events of an engine in words.

use hsdp::{Event, Phase};

/// Returns the microbatch of an event, and its word: `g1`, `u1'`, `r1`, `a1`. The machine of the
/// step has the same words.
///
/// # Panics
/// If the event has no word.
#[must_use]
pub fn word(event: &Event) -> (usize, String) {
    let prime = |phase: &Phase| if *phase == Phase::Backward { "'" } else { "" };
    match event {
        Event::Gather { unit, microbatch, phase } => {
            (*microbatch, format!("g{unit}{}", prime(phase)))
        }
        Event::Unshard { unit, microbatch, phase } => {
            (*microbatch, format!("u{unit}{}", prime(phase)))
        }
        Event::ReduceScatter { unit, microbatch } => (*microbatch, format!("r{unit}")),
        Event::AllReduce { unit, microbatch } => (*microbatch, format!("a{unit}")),
        Event::ScatterSums { unit, microbatch } => (*microbatch, format!("c{unit}")),
        Event::GatherSlices { unit } => (0, format!("h{unit}")),
        other => panic!("{other:?} has no word yet"),
    }
}
