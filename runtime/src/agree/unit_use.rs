//! The record of a rank's next unit: 24 bytes that ranks exchange where the first forward leaves
//! the declared order, and before each gather after that. PROTOCOL.md, "The order of units".

use hsdp_sharding::step::{Exchange, NextUnit, UnitUse};
use hsdp_sharding::{ModelSpec, Rank, UnitId};

use crate::agree::header::check_magic;
use crate::error::Error;

const WORDS: usize = Exchange::UNIT;
const MAGIC: u64 = u64::from_be_bytes(*b"hsdp-un2");
const FOLLOWS: u64 = 0;
const ENDS: u64 = 1;
const FIRST_UNIT: u64 = 2;

/// Returns the record of a rank that says this after `place` units.
pub(crate) fn encode(says: UnitUse, place: usize) -> [u64; WORDS] {
    let word = match says {
        UnitUse::Follows => FOLLOWS,
        UnitUse::Ends => ENDS,
        UnitUse::Needs(unit) => FIRST_UNIT + u64::from(unit.get()),
    };
    [MAGIC, word, place as u64]
}

/// Decodes a record: the rank's next operation, and the number of units before it. `None` if there
/// is no such operation.
fn decode(record: &[u64]) -> Option<(UnitUse, usize)> {
    let says = match record[1] {
        FOLLOWS => UnitUse::Follows,
        ENDS => UnitUse::Ends,
        unit => UnitUse::Needs(UnitId::new(u32::try_from(unit - FIRST_UNIT).ok()? as usize)),
    };
    Some((says, usize::try_from(record[2]).ok()?))
}

/// Warns that the declared order stays, because ranks use the units in different orders: two of
/// them do what is said here.
pub(crate) fn warn(step: u64, ranks: [(Rank, UnitUse); 2], spec: &ModelSpec) {
    let [(one, first), (other, second)] = ranks;
    let [first, second] = [first, second].map(|says| in_words(says, spec));
    hsdp_warnings::warn!(
        step,
        "ranks use the units of the model in different orders: rank {one} {first}, rank {other} \
         {second}; the gathers stay in the declared order, and may need more memory than planned"
    );
}

fn in_words(says: UnitUse, spec: &ModelSpec) -> String {
    match says {
        UnitUse::Needs(unit) => format!("needs unit {}", spec[unit].name),
        UnitUse::Ends => "has ended its forward".to_owned(),
        UnitUse::Follows => "has no forward".to_owned(),
    }
}

/// Decodes the records of all ranks, and concludes from them: see [`NextUnit::of`]. `found` are the
/// units that the forward has gathered so far.
///
/// # Errors
/// `Disagreement` names the first rank whose protocol differs from this rank's, or else the first
/// rank whose record fits no forward.
pub(crate) fn decide(
    gathered: &[u64],
    declared: &[UnitId],
    found: &[UnitId],
    own: Rank,
) -> Result<(usize, NextUnit), Error> {
    check_magic(gathered, WORDS, MAGIC, "the protocol of the unit records", own)?;
    let read: Vec<_> = gathered.chunks_exact(WORDS).map(decode).collect();
    let in_forward = read.iter().flatten().filter(|(says, _)| *says != UnitUse::Follows);
    let places_of_ranks = in_forward.map(|(_, place)| *place);
    let farthest = places_of_ranks.filter(|place| *place <= found.len()).max().unwrap_or(0);
    let mut places = vec![usize::MAX; declared.len()];
    found.iter().enumerate().for_each(|(place, unit)| places[unit.index()] = place);
    let fits = |record: &Option<(UnitUse, usize)>| match *record {
        None => false,
        Some((UnitUse::Follows, _)) => true,
        Some((_, place)) if place > found.len() => false,
        Some((UnitUse::Ends, _)) => true,
        // A rank that needs the unit that is declared next goes on without an exchange.
        Some((UnitUse::Needs(unit), place)) => {
            places.get(unit.index()).is_some_and(|before| *before >= place)
                && (place == farthest || declared.get(place) != Some(&unit))
        }
    };
    if let Some(rank) = read.iter().position(|record| !fits(record)) {
        let [got, want] = [rank, own.index()].map(|rank| in_numbers(&gathered[rank * WORDS..]));
        let what = "the next unit of the forward".into();
        let rank = Rank::new(rank);
        return Err(Error::Disagreement { what, rank, got, other: own, want });
    }
    let records: Vec<_> = read.into_iter().flatten().collect();
    Ok(NextUnit::of(&records, declared))
}

fn in_numbers(record: &[u64]) -> String {
    let next = match record[1] {
        FOLLOWS => "no forward".to_owned(),
        ENDS => "the end".to_owned(),
        unit => format!("unit {}", unit - FIRST_UNIT),
    };
    format!("{next} after {} units", record[2])
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use hsdp_sharding::step::{Begin, Conclusion, Headers, Output, Rules, StepMachine};
    use hsdp_sharding::{Mesh, Param, Plan, PlanOptions, Unit};

    use super::*;

    #[test]
    fn records_are_read_as_they_were_written_and_another_protocol_is_named() {
        let records =
            [(UnitUse::Needs(UnitId::new(7)), 3), (UnitUse::Ends, 3), (UnitUse::Follows, 0)];
        let mut words = records.map(|(says, place)| encode(says, place)).concat();
        let read: Vec<_> = words.chunks_exact(WORDS).map(decode).collect();
        assert_eq!(read, records.map(Some));
        words[3] += 1;
        let message = decide(&words, &[], &[], Rank::new(0)).unwrap_err().to_string();
        let expected = "the protocol of the unit records differs between ranks: rank 1 has 0x";
        assert!(message.starts_with(expected), "{message}");
    }

    /// Decides where rank 0 says this, and rank 1 sends these two words, in a model of three units.
    fn against(says: UnitUse, place: usize, words: [u64; 2]) -> Result<(usize, NextUnit), String> {
        let declared = [0, 1, 2].map(UnitId::new);
        let gathered = [encode(says, place), [MAGIC, words[0], words[1]]].concat();
        let decided = decide(&gathered, &declared, &declared, Rank::new(0));
        decided.map_err(|error| error.to_string())
    }

    #[test]
    fn a_record_that_fits_no_forward_is_an_error() {
        let needs = |unit: u64| FIRST_UNIT + unit;
        let own = (UnitUse::Needs(UnitId::new(2)), 1);
        let follows = (UnitUse::Follows, 0);
        let ends = (UnitUse::Ends, 3);
        for (own, words, named) in [
            // There is no such unit.
            (follows, [needs(3), 1], "unit 3 after 1 units"),
            (follows, [needs(1 << 40), 1], "unit 1099511627776 after 1 units"),
            // There are not as many units.
            (follows, [needs(2), 4], "unit 2 after 4 units"),
            (ends, [ENDS, 4], "the end after 4 units"),
            (ends, [needs(2), u64::MAX], "unit 2 after 18446744073709551615 units"),
            // The unit was gathered before.
            (follows, [needs(0), 1], "unit 0 after 1 units"),
            // The unit is the declared one, which needs no exchange.
            (own, [needs(0), 0], "unit 0 after 0 units"),
            (ends, [needs(1), 1], "unit 1 after 1 units"),
        ] {
            let message = against(own.0, own.1, words).expect_err(named);
            let expected = format!(
                "the next unit of the forward differs between ranks: rank 1 has {named}, rank 0 has"
            );
            assert!(message.starts_with(&expected), "{message}");
        }
    }

    #[test]
    fn the_broken_rank_is_named_and_not_one_that_needs_the_declared_unit() {
        let declared = [0, 1, 2].map(UnitId::new);
        let found = [UnitId::new(2)];
        let own = encode(UnitUse::Needs(UnitId::new(1)), 1);
        let gathered = [own, [MAGIC, ENDS, 7]].concat();
        let message = decide(&gathered, &declared, &found, Rank::new(0)).unwrap_err().to_string();
        assert!(message.contains("rank 1 has the end after 7 units"), "{message}");
    }

    #[test]
    fn records_of_ranks_that_differ_fit() {
        let own = (UnitUse::Needs(UnitId::new(2)), 1);
        let is_differ =
            |words| matches!(against(own.0, own.1, words), Ok((_, NextUnit::Differ(_))));
        assert!(is_differ([ENDS, 3]) && is_differ([ENDS, 0]) && is_differ([FIRST_UNIT + 2, 0]));
        assert_eq!(
            against(own.0, own.1, [FIRST_UNIT + 2, 1]),
            Ok((1, NextUnit::Gather(UnitId::new(2))))
        );
        assert_eq!(against(own.0, own.1, [FOLLOWS, 0]), Ok((1, NextUnit::Gather(UnitId::new(2)))));
    }

    /// Runs a microbatch of rank 0, whose program uses these units, and whose peer sends these
    /// records. Returns `None` if a record is refused, or there are not enough.
    fn microbatch(plan: &Arc<Plan>, uses: &[usize], mut records: &[[u64; 2]]) -> Option<()> {
        let mut machine = StepMachine::new(Arc::clone(plan), Rules::default());
        let mut answer = |machine: &mut StepMachine| {
            let mut handed = None;
            while let Some(output) = machine.poll() {
                match output {
                    Output::Exchange(Exchange::Headers) => {
                        machine.conclude(Conclusion::Headers(Headers::of_data(2))).ok()?;
                    }
                    Output::Exchange(Exchange::Unit { says, place }) => {
                        let (words, rest) = records.split_first()?;
                        records = rest;
                        let gathered = [encode(says, place), [MAGIC, words[0], words[1]]].concat();
                        let order = plan.order();
                        let found = machine.found();
                        let (place, next) = decide(&gathered, order, found, Rank::new(0)).ok()?;
                        machine.conclude(Conclusion::Unit(place, next)).ok()?;
                    }
                    Output::Exchange(_) => machine.conclude(Conclusion::Agreed).ok()?,
                    Output::Await(operation) | Output::Follow(operation) => {
                        machine.done(operation).ok()?;
                    }
                    Output::Hand { unit, .. } => handed = Some(unit),
                    _ => {}
                }
            }
            Some(handed)
        };
        machine.begin(Begin::step(0, Some(1))).ok()?;
        answer(&mut machine)?;
        machine.begin_microbatch().ok()?;
        answer(&mut machine)?;
        for unit in uses.iter().copied().map(UnitId::new) {
            machine.need(unit).expect("each unit is used once");
            assert_eq!(answer(&mut machine)?, Some(unit));
        }
        machine.end_microbatch().expect("it is open");
        answer(&mut machine)?;
        assert!(!machine.has_microbatch());
        Some(())
    }

    #[test]
    fn no_records_of_a_broken_rank_make_others_panic() {
        let unit = |name: &str| Unit::new(name).param(Param::new(format!("{name}.w"), [4]));
        let spec = ModelSpec::new().unit(unit("a")).unit(unit("b")).unit(unit("c"));
        let plan = Plan::new(spec, Mesh::new(1, 2).expect("a mesh"), PlanOptions::default());
        let plan = Arc::new(plan.expect("a plan"));
        let records = || (0..6).flat_map(|says| (0..5).map(move |place| [says, place]));
        let mut passed = 0;
        for uses in [&[0, 1, 2][..], &[0, 2, 1], &[2, 0], &[]] {
            for first in records() {
                for second in records() {
                    for third in records() {
                        let ended = microbatch(&plan, uses, &[first, second, third]);
                        passed += usize::from(ended.is_some());
                    }
                }
            }
        }
        assert!(passed > 100, "{passed}");
    }
}
