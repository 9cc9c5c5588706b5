//! Rows of calls, and how long they take.

use std::fmt;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use hsdp_comm::{Channel, Error, Group, RankFailure, Reduction, Tag, World, WorldOptions, launch};

use crate::case::{Case, Collective, settled};
use crate::options::Options;
use crate::place::{Place, Wrong};

/// Calls that find out how many fit into a row, after one whose result is checked.
const TRIALS: u32 = 2;
/// Calls of a row: few of them would have the time in which the ranks begin and end in theirs.
const CALLS: RangeInclusive<u64> = 5..=10_000;

/// Of one call, over the rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) least: Duration,
    pub(crate) median: Duration,
}

/// When a rank began a row of calls, and when it ended it.
struct Span {
    began: Instant,
    ended: Instant,
}

/// A rank's rows, and the calls in each: as many on all ranks.
struct Rows {
    spans: Vec<Span>,
    calls: u32,
}

enum Failure {
    Wrong(Place, Wrong),
    Comm(Error),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wrong(place, wrong) => write!(f, "on rank {}, {wrong}", place.rank),
            Self::Comm(error) => write!(f, "{error}"),
        }
    }
}

impl From<RankFailure> for Failure {
    fn from(failure: RankFailure) -> Self {
        Self::Comm(failure.into())
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Comm(error)
    }
}

/// Has all ranks of a world call a collective.
///
/// # Errors
/// The first wrong result, or what ended the world.
pub(crate) fn measure(
    options: &Options,
    collective: &Collective,
    place: Place,
) -> Result<Times, String> {
    let failed = |what: &dyn fmt::Display| {
        format!("{}, {}, {} ranks: {what}", collective.name, place.size(), place.ranks)
    };
    let on_rank = |world: World| rows(options, collective, place.of(world.rank().index()), &world);
    let mut all = Vec::with_capacity(place.ranks);
    let mut ended = Vec::new();
    for ran in launch(place.ranks, WorldOptions::default(), on_rank) {
        match ran {
            Ok(rows) => all.push(rows),
            Err(wrong @ Failure::Wrong(..)) => return Err(failed(&wrong)),
            // The world ended: perhaps since another rank has found a wrong result.
            Err(Failure::Comm(error)) => ended.push(error),
        }
    }
    ended.first().map_or_else(|| Ok(times(&all)), |error| Err(failed(error)))
}

fn rows(
    options: &Options,
    collective: &Collective,
    place: Place,
    world: &World,
) -> Result<Rows, Failure> {
    let group = world.world_group(Channel::User);
    let mut case = (collective.prepare)(place);
    case.call(&group)?;
    case.check().map_err(|wrong| Failure::Wrong(place, wrong))?;
    case.calm();
    let trial = row(&mut *case, &group, TRIALS)?;
    let calls = agree(&group, trial.ended - trial.began, options.each)?;
    let spans = (0..options.samples).map(|_| row(&mut *case, &group, calls));
    Ok(Rows { spans: spans.collect::<Result<_, _>>()?, calls })
}

/// How many calls fit into a row: all ranks go by the slowest.
fn agree(group: &Group, trial: Duration, each: Duration) -> Result<u32, Error> {
    let trial = trial.as_nanos().try_into().unwrap_or(u64::MAX);
    let slowest = settled(group.all_reduce(Tag::default(), Reduction::Max, vec![trial]))?;
    let call = slowest.first().map_or(1, |nanos| nanos / u64::from(TRIALS)).max(1);
    let each = u64::try_from(each.as_nanos()).unwrap_or(u64::MAX);
    let fitting = (each / call).clamp(*CALLS.start(), *CALLS.end());
    Ok(u32::try_from(fitting).expect("no more than the most calls"))
}

fn row(case: &mut dyn Case, group: &Group, calls: u32) -> Result<Span, Error> {
    settled(group.barrier(Tag::default()))?;
    let began = Instant::now();
    for _ in 0..calls {
        case.call(group)?;
    }
    Ok(Span { began, ended: Instant::now() })
}

/// A row lasts from the first rank that begins it to the last that ends it.
fn times(ranks: &[Rows]) -> Times {
    let Some(first) = ranks.first() else {
        return Times { least: Duration::ZERO, median: Duration::ZERO };
    };
    let of_row = |row: usize| {
        let spans = || ranks.iter().filter_map(|rows| rows.spans.get(row));
        let began = spans().map(|span| span.began).min();
        let ended = spans().map(|span| span.ended).max();
        ended.zip(began).map_or(Duration::ZERO, |(ended, began)| ended - began) / first.calls
    };
    let mut times: Vec<Duration> = (0..first.spans.len()).map(of_row).collect();
    times.sort_unstable();
    let at = |place: usize| times.get(place).copied().unwrap_or_default();
    Times { least: at(0), median: at(times.len() / 2) }
}
