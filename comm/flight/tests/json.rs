//! Records as text, and texts that are no records.

use std::sync::Arc;

use hsdp_flight::{
    Channel, Counts, Descriptor, FlightEntry, FlightError, FlightGroup, FlightRecord, FlightState,
    GroupId, ModelLabel, ModelName, Op, Origin, Part, PartKind, Recorder, Reduction, Stage, Tag,
    explain,
};
use hsdp_kernels::{Divisor, Scaling, Wire};
use hsdp_sharding::{DType, Rank, UnitId};
use proptest::prelude::*;
use proptest::sample::select;

fn rank() -> impl Strategy<Value = Rank> {
    any::<u32>().prop_map(|rank| Rank::new(rank as usize))
}

fn group() -> impl Strategy<Value = (GroupId, FlightGroup)> {
    (select(&Channel::ALL[..]), 1_usize..4).prop_map(|(channel, members)| {
        let ranks: Vec<Rank> = (0..members).map(Rank::new).collect();
        let id = GroupId::of(&ranks, channel);
        (id, FlightGroup { id, channel, ranks })
    })
}

fn scaling() -> impl Strategy<Value = Scaling> {
    let wire = select(vec![Wire::F32, Wire::F16, Wire::BF16]);
    let divisor = || {
        let value = any::<f32>().prop_filter("a divisor", |it| it.is_finite() && *it > 0.0);
        value.prop_map(|value| Divisor::new(value).expect("finite and positive"))
    };
    (wire, divisor(), divisor()).prop_map(|(wire, pre, post)| Scaling { wire, pre, post })
}

fn tag() -> impl Strategy<Value = Tag> {
    let unit = proptest::option::of(any::<u32>().prop_map(|unit| UnitId::new(unit as usize)));
    (unit, select(&Stage::ALL[..]), any::<u64>(), any::<usize>()).prop_map(
        |(unit, stage, step, microbatch)| Tag {
            unit,
            stage,
            step,
            microbatch,
            model: (step % 3 > 0).then(|| ModelLabel {
                number: u32::try_from(step % 5).unwrap_or(0),
                name: ModelName::new(["", "a", "critic"][microbatch % 3]),
            }),
            part: (step % 2 > 0).then(|| Part {
                kind: PartKind::ALL[microbatch % PartKind::ALL.len()],
                number: u32::try_from(step % 7).unwrap_or(0),
            }),
        },
    )
}

prop_compose! {
    fn entry()(
        ((group, FlightGroup { channel, .. }), tag, scaling) in (group(), tag(), proptest::option::of(scaling())),
        (op, state) in (select(&Op::ALL[..]), select(&FlightState::ALL[..])),
        reduction in proptest::option::of(select(&Reduction::ALL[..])),
        dtype in proptest::option::of(select(&DType::ALL[..])),
        (root, peer) in (proptest::option::of(rank()), proptest::option::of(rank())),
        (elements, uneven) in (any::<usize>(), any::<bool>()),
        (epoch, sequence, bytes, issued_ns) in any::<(u64, u64, u64, u64)>(),
        (waited_ns, settled_ns) in any::<(Option<u64>, Option<u64>)>(),
    ) -> FlightEntry {
        FlightEntry {
            number: 0, group, channel, epoch, sequence, op, reduction, dtype, elements, uneven, bytes, root, peer,
            scaling, tag, state, issued_ns, waited_ns, settled_ns,
        }
    }
}

prop_compose! {
    fn record()(
        (rank, size) in (0_usize..8, 8_usize..1 << 20),
        (step, epoch, began_unix_us, taken_ns) in any::<(u64, u64, u64, u64)>(),
        overwritten in prop_oneof![any::<u64>(), Just(u64::MAX)],
        end in proptest::option::of(".*"),
        groups in proptest::collection::vec(group(), 0..4),
        mut entries in proptest::collection::vec(entry(), 0..8),
    ) -> FlightRecord {
        // No more entries are issued than u64 can count.
        let overwritten = overwritten.min(u64::MAX - entries.len() as u64);
        for (entry, number) in entries.iter_mut().zip(overwritten..) {
            entry.number = number;
        }
        let rank = Rank::new(rank);
let groups = groups.into_iter().map(|(_, group)| group).collect();
        FlightRecord { rank, size, step, epoch, began_unix_us, taken_ns, end, overwritten, groups, entries }
    }
}

proptest! {
    #[test]
    fn what_is_written_is_read(record in record()) {
        let text = record.to_json();
        prop_assert_eq!(FlightRecord::from_json(&text).expect("it was written so"), record);
    }

    #[test]
    fn garbage_is_refused(text in ".*") {
        prop_assert!(FlightRecord::from_json(&text).is_err());
    }

    /// A record that a broken disk or a bad copy has changed is read or refused, and a record that is read can be explained.
    #[test]
    fn damage_never_panics(mut records in proptest::collection::vec(record(), 1..4), at in any::<prop::sample::Index>(), with in any::<u8>()) {
        records.iter_mut().for_each(|record| record.size = 8);
        let mut bytes = records[0].to_json().into_bytes();
        let at = at.index(bytes.len());
        bytes[at] = with;
        let Ok(text) = String::from_utf8(bytes) else { return Ok(()) };
        records.extend(FlightRecord::from_json(&text));
        prop_assert!(!explain(&records).to_string().is_empty());
    }

    #[test]
    fn half_a_record_is_refused(record in record(), at in any::<prop::sample::Index>()) {
        let text = record.to_json();
        let half = at.index(text.len());
        prop_assume!(text.is_char_boundary(half));
        prop_assert!(FlightRecord::from_json(&text[..half]).is_err());
    }
}

/// A record of rank 1 of 2, in a ring of so many entries, which has issued so many barriers.
fn recorded(entries: usize, issued: u64) -> FlightRecord {
    let ranks: Arc<[Rank]> = [0, 1].map(Rank::new).into();
    let channel = Channel::Reduce;
    let recorder = Recorder::new(entries, Origin::now());
    let group = GroupId::of(&ranks, channel);
    recorder.know(group, channel, &ranks);
    for sequence in 0..issued {
        let tag = Tag::new(Stage::Reduce).unit(UnitId::new(3)).step(7);
        let reduction = None;
        let dtype = None;
        let counts = Counts::Each(0);
        let root = None;
        let peer = None;
        let scaling = None;
        let op = Op::Barrier;
        let epoch = 0;
        recorder.issue(&Descriptor {
            group,
            channel,
            epoch,
            sequence,
            op,
            reduction,
            dtype,
            counts,
            root,
            peer,
            scaling,
            tag,
        });
    }
    recorder.record(Rank::new(1), 2)
}

fn written() -> String {
    recorded(1024, 1).to_json()
}

/// The outcome of reading a record in which `from` was replaced.
fn refused(from: &str, to: &str) -> String {
    let text = written();
    assert!(text.contains(from), "`{from}` is missing in {text}");
    let error = FlightRecord::from_json(&text.replacen(from, to, 1)).expect_err("it is wrong");
    error.to_string()
}

#[test]
fn a_record_reads_as_names_and_numbers() {
    let text = written();
    let expected = [
        r#"{"version":1,"rank":1,"size":2,"#,
        r#""channel":"reduce","ranks":[0,1]"#,
        r#""op":"barrier""#,
        r#""tag":{"stage":"reduce","unit":3,"step":7,"microbatch":0},"state":"issued""#,
    ];
    for part in expected {
        assert!(text.contains(part), "`{part}` is missing in {text}");
    }
}

/// Records of an earlier build, with all names and both cases of each optional field.
#[test]
fn what_was_written_before_is_read_and_written_as_then() {
    for text in include_str!("written.jsonl").lines() {
        let record = FlightRecord::from_json(text).expect("it was written so");
        assert_eq!(record.to_json(), text);
    }
}

#[test]
fn another_version_is_refused_by_both_numbers() {
    let said = refused(r#""version":1"#, r#""version":2"#);
    assert_eq!(said, "a flight record of version 2; this library reads version 1");
    // Whatever else is in it.
    let error = FlightRecord::from_json(r#"{"version":7,"ranks":"all"}"#).expect_err("unknown");
    assert!(matches!(error, FlightError::Version { found: 7, known: 1 }));
}

#[test]
fn what_is_wrong_is_said_with_its_place() {
    assert!(
        refused(r#""op":"barrier""#, r#""op":"barriere""#).contains("unknown variant `barriere`")
    );
    let said = refused(r#""version":1,"#, "");
    assert!(said.starts_with("not a flight record: missing field `version`"), "{said}");
    assert!(refused(r#""step":7"#, r#""step":-7"#).contains("line 1 column"));
    assert_eq!(
        refused(r#""rank":1,"size":2"#, r#""rank":2,"size":2"#),
        "not a flight record: rank 2 of a world of 2"
    );
    assert!(refused(r#""ranks":[0,1]"#, r#""ranks":[0,9]"#).contains("has rank 9 of a world of 2"));
    assert_eq!(
        refused(r#""number":0"#, r#""number":5"#),
        "not a flight record: entry 5 stands where 0 belongs"
    );
    assert_eq!(
        refused(r#""overwritten":0"#, r#""overwritten":18446744073709551615"#),
        "not a flight record: 1 entries after 18446744073709551615 others; u64 cannot count them"
    );
    let said = refused(r#""size":2"#, r#""size":1000000000000"#);
    assert!(said.contains("a world of 1000000000000 ranks; at most 1048576 are read"), "{said}");
    for garbage in ["", "null", "[]", "{}", "\u{0}", &"[".repeat(1 << 20)] {
        let error = FlightRecord::from_json(garbage).expect_err("garbage");
        assert!(matches!(error, FlightError::Malformed { .. }), "{error}");
    }
}

#[test]
fn the_largest_ring_gives_a_text_that_can_be_read() {
    let record = recorded(usize::MAX, (1 << 16) + 3);
    assert_eq!((record.entries.len(), record.overwritten), (1 << 16, 3));
    assert_eq!(FlightRecord::from_json(&record.to_json()).expect("read"), record);
}
