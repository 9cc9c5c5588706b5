//! Faults from text, in the words in which they are shown.

use std::str::FromStr;
use std::time::Duration;

use hsdp_sharding::{Rank, UnitId};

use super::{Fault, FaultKind, FaultPlace};
use crate::{Error, Stage, WorldError};

/// Reads a fault in its displayed form.
///
/// ```
/// use hsdp_comm::Fault;
///
/// let sentence = "rank 1, step 3, unit 2, reduce: delay of 300ms";
/// let fault: Fault = sentence.parse().expect("a fault");
/// assert_eq!(fault.to_string(), sentence);
/// ```
impl FromStr for Fault {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let refused =
            |problem| Error::World(WorldError::BadFault { fault: text.to_owned(), problem });
        let bad = |problem: &str| {
            refused(format!("{problem} (a fault is written as `rank 1, step 3, unit 2: panic`)"))
        };
        let (place, kind) = text.rsplit_once(": ").ok_or_else(|| bad("there is no `: KIND`"))?;
        let mut words = place.split(", ");
        let rank = words.next().and_then(|word| number::<u32>(word, "rank"));
        let rank = rank.ok_or_else(|| bad("it must begin with `rank N`, N below 2^32"))?;
        let step = words.next().and_then(|word| number(word, "step"));
        let step = step.ok_or_else(|| bad("`step N` must follow the rank, N below 2^64"))?;
        let rest: Vec<&str> = words.collect();
        let place = place_of(&rest).ok_or_else(|| {
            bad("the place must be `unit N`, `unit N, STAGE`, `STAGE` or `call N`")
        })?;
        let kind = kind_of(kind).ok_or_else(|| bad(&kinds()))?;
        let fault = Self { rank: Rank::new(rank as usize), step, place, kind };
        fault.check_kind().map_err(refused).map(|()| fault)
    }
}

/// `word` without its name.
fn number<N: FromStr>(word: &str, name: &str) -> Option<N> {
    word.strip_prefix(name)?.trim().parse().ok()
}

fn place_of(words: &[&str]) -> Option<FaultPlace> {
    let unit = |word| Some(UnitId::new(number::<u32>(word, "unit")? as usize));
    let stage = |word: &str| Stage::ALL.into_iter().find(|stage| stage.name() == word);
    match words {
        [word] => number(word, "call")
            .map(FaultPlace::Call)
            .or_else(|| unit(word).map(FaultPlace::Unit))
            .or_else(|| stage(word).map(FaultPlace::Stage)),
        [first, second] => Some(FaultPlace::UnitStage(unit(first)?, stage(second)?)),
        _ => None,
    }
}

fn kind_of(text: &str) -> Option<FaultKind> {
    if let Some(delay) = text.strip_prefix("delay of ") {
        return duration(delay).map(FaultKind::Delay);
    }
    if let Some(value) = text.strip_prefix("a gradient of ") {
        return value.parse().ok().map(FaultKind::NonFinite);
    }
    FaultKind::PLAIN.into_iter().find_map(|(kind, name)| (name == text).then_some(kind))
}

/// The kinds that there are, in words.
fn kinds() -> String {
    let names = FaultKind::PLAIN.map(|(_, name)| name).join(", ");
    format!("the kind must be one of {names}, `delay of 300ms`, `a gradient of NaN`")
}

/// `300ms`, `1.5s`: a number and its unit, as durations are shown.
fn duration(text: &str) -> Option<Duration> {
    let digits = text.find(|it: char| !(it.is_ascii_digit() || it == '.'))?;
    let (number, unit) = text.split_at(digits);
    let seconds: f64 = number.parse().ok()?;
    let scale = match unit {
        "s" => 1.0,
        "ms" => 1e-3,
        "µs" | "us" => 1e-6,
        "ns" => 1e-9,
        _ => return None,
    };
    Duration::try_from_secs_f64(seconds * scale).ok()
}

#[cfg(test)]
mod tests;
