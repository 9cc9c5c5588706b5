//! Headers come back as they were, and whatever else comes is refused.

use proptest::prelude::*;

use std::time::Duration;

use hsdp_kernels::{Divisor, Wire};
use hsdp_sharding::{DType, Rank, UnitId};

use super::*;
use crate::CallError::BadRank;
use crate::WorldError::{self, Aborted, WorkFailed};
use crate::engine::judge::{Issued, MemberWait, Numbers, RankState, Rolled, Wait, WaitKey};
use crate::mismatch::{Mismatch, MismatchRow, Wanted};
use crate::remote::comparer::{Compared, Hashes, Question, Urgency, WaitReport, WaitVerdict};
use crate::{
    AbortReason, Channel, Counts, Error, GroupId, Mistake, Op, Reduction, Scaling, Stage, Tag,
};

fn descriptor() -> Descriptor {
    Descriptor {
        group: GroupId::of(&[Rank::new(0), Rank::new(3)], Channel::Reduce),
        channel: Channel::Reduce,
        epoch: 2,
        sequence: 1 << 40,
        op: Op::ReduceScatter,
        reduction: Some(Reduction::Sum),
        dtype: Some(DType::BF16),
        counts: Counts::Each(1003),
        root: None,
        peer: None,
        scaling: Some(Scaling {
            wire: Wire::BF16,
            pre: Divisor::new(3.0).expect("a divisor"),
            post: Divisor::ONE,
        }),
        tag: Tag::new(Stage::Reduce).unit(UnitId::new(7)).step(9).microbatch(2),
    }
}

fn others() -> Vec<Descriptor> {
    let counts = Counts::Splits { send: vec![1, 0, 2], receive: vec![0, 0, 5] };
    let transfer = Descriptor { op: Op::Send, peer: Some(Rank::new(4)), ..descriptor() };
    let rooted = Descriptor { op: Op::Broadcast, root: Some(Rank::new(1)), ..descriptor() };
    let bare = Descriptor { dtype: None, reduction: None, scaling: None, ..descriptor() };
    vec![descriptor(), Descriptor { counts, ..descriptor() }, transfer, rooted, bare]
}

#[test]
fn messages_say_what_they_said() {
    for descriptor in others() {
        let form = Form { function: 6, layout: u64::MAX, note: 1 };
        let data_header = DataHeader { descriptor: Arc::new(descriptor), step: 4, form };
        let bytes = bytes(&data_header);
        assert_eq!(read::<DataHeader>(&bytes), Ok(data_header));
        assert_eq!(
            read::<DataHeader>(&[&*bytes, &[0]].concat()).expect_err("one too many"),
            "1 bytes follow its header"
        );
        assert!(read::<DataHeader>(&bytes[..bytes.len() - 1]).is_err());
    }
}

fn ends() -> Vec<Error> {
    let [zero, two] = [0, 2].map(Rank::new);
    let operation = Arc::new(descriptor());
    let wanted = [
        Wanted::Arrived(Arc::clone(&operation)),
        Wanted::Missing(None),
        Wanted::Missing(Some(Arc::clone(&operation))),
        Wanted::Waiting { operation: Arc::clone(&operation), missing: vec![two] },
    ];
    let rows = wanted.into_iter().map(|wanted| MismatchRow { rank: two, wanted }).collect();
    let table = Arc::new(Mismatch { problem: "ranks disagree".to_owned(), rows });
    let awaited = Arc::clone(&operation);
    let arrived = [zero].into();
    let missing = [two].into();
    let reasons = [
        AbortReason::Panicked { message: "it fell".into() },
        AbortReason::Left { awaited: Arc::clone(&awaited) },
        AbortReason::Deadline { awaited, deadline: Duration::from_millis(7), arrived, missing },
        AbortReason::Requested { reason: "asked".into() },
        AbortReason::Gone,
        AbortReason::Unreachable { problem: "no wire".into() },
        AbortReason::Garbled { problem: "no message".into() },
    ];
    let worlds = reasons.iter().map(|reason| Aborted {
        rank: two,
        step: 8,
        operation: Some(Arc::clone(&operation)),
        reason: reason.clone(),
    });
    let works = reasons
        .iter()
        .map(|reason| WorkFailed { operation: Arc::clone(&operation), reason: reason.clone() });
    let step = |mistake| {
        let reason = "it overflowed".into();
        Error::StepAborted { rank: zero, step: 3, reason, mistake }
    };
    let steps = [None, Some(Mistake::of(&3))].map(step);
    let worlds = worlds.chain(works).chain([WorldError::Mismatch(table)]).map(Error::from);
    worlds.chain(steps).collect()
}

#[test]
fn ends_are_the_same_on_the_other_side() {
    for end in ends() {
        let bytes = end_bytes(5, &end, Rank::new(1));
        assert_eq!(end_of(&bytes), Ok((5, end)));
    }
}

#[test]
fn an_end_of_another_kind_passes_its_text_on() {
    let end = Error::from(BadRank { rank: Rank::new(4), size: 4 });
    let (_, passed) = end_of(&end_bytes(0, &end, Rank::new(1))).expect("it is an end");
    assert!(passed.to_string().contains(&end.to_string()), "{passed}");
    assert!(passed.is_fatal());
}

#[test]
fn an_end_that_is_too_long_is_shortened() {
    let reason = AbortReason::Panicked { message: "x".repeat(3 << 20).into() };
    let end = Aborted { rank: Rank::new(2), step: 1, operation: None, reason };
    let end = Error::from(end);
    let bytes = end_bytes(0, &end, Rank::new(2));
    assert!(bytes.len() < 1 << 20);
    let (_, passed) = end_of(&bytes).expect("it is an end");
    assert!(passed.to_string().contains("it panicked: xxx"), "its beginning is passed on");
}

/// A state with something of everything.
fn state() -> RankState {
    let operation = Arc::new(descriptor());
    let group = descriptor().group;
    let other = GroupId::of(&[Rank::new(0)], Channel::User);
    let numbers = Numbers { epoch: 2, next: 9, skipped: [3, 7].into() };
    let hashes = [(4, u128::MAX), (5, 1 << 100)].into();
    let rolled = Rolled { count: 6, hashes, entry: Some(Arc::clone(&operation)), last: None };
    let missing = vec![Rank::new(3), Rank::new(1)];
    let members = |index| MemberWait {
        operation: Arc::clone(&operation),
        index,
        missing: missing.clone(),
        is_of_issuer: index.is_none(),
    };
    RankState {
        step: 8,
        epoch: 2,
        given_up: true,
        has_left: true,
        last: Some(Arc::clone(&operation)),
        issued: Issued([(group, numbers), (other, Numbers::default())].into()),
        rolled: [(group, rolled), (other, Rolled::default())].into(),
        waits: vec![
            Wait::Members(members(None)),
            Wait::Members(members(Some(5))),
            Wait::Work(None),
            Wait::Work(Some(Rank::new(2))),
        ],
    }
}

/// Everything that is told to the comparer or by it.
fn compared() -> Vec<Compared> {
    let wait = WaitKey::new(&descriptor(), Some(3));
    let reports = [Urgency::Stalled, Urgency::Late, Urgency::Deadline]
        .map(|urgency| Compared::Report(WaitReport { urgency, wait }));
    let group = descriptor().group;
    let questions = [Hashes::Last, Hashes::All(group), Hashes::Entry(group, 1 << 33)]
        .map(|hashes| Compared::Question(Question { number: 3, hashes }));
    let verdicts =
        [None, Some(Rank::new(4))].map(|culprit| Compared::Verdict(WaitVerdict { wait, culprit }));
    let states = [state(), RankState::default()].map(|state| Compared::State(7, state));
    let reports = reports.into_iter().chain([Compared::Differ]);
    reports.chain(questions).chain(verdicts).chain(states).collect()
}

#[test]
fn the_comparer_and_ranks_tell_each_other_what_they_were_told() {
    for said in compared() {
        assert_eq!(read(&bytes(&said)), Ok(said));
    }
    assert_eq!(read(&bytes(&state())), Ok(state()));
}

#[test]
fn rows_say_who_waits_for_whom() {
    let operation = Arc::new(descriptor());
    let missing = vec![Rank::new(1)];
    let row = MismatchRow { rank: Rank::new(0), wanted: Wanted::Waiting { operation, missing } };
    let table = Mismatch { problem: String::new(), rows: vec![row.clone(), row] };
    let error = Error::from(WorldError::Mismatch(Arc::new(table)));
    assert_eq!(end_of(&end_bytes(0, &error, Rank::new(0))), Ok((0, error)));
}

#[test]
fn the_numbers_of_a_state_have_one_order() {
    let of = |skipped: [u64; 2]| {
        let group = (GroupId::from_hash(1), 0_u64, 9_u64, skipped.to_vec());
        let start = bytes(&(1_u64, 2_u64, false, false, None::<u8>));
        let state = [start, bytes(&(vec![group], 0_u8, 0_u8))].concat();
        read::<RankState>(&state).map(drop)
    };
    let refused = || Err("its header is not in canonical form".to_owned());
    assert_eq!([of([3, 7]), of([7, 3]), of([3, 3])], [Ok(()), refused(), refused()]);
}

#[test]
fn a_number_has_one_form() {
    assert_eq!(read::<u64>(&[0x80, 1]), Ok(128));
    let refused = Err("its header is not in canonical form".to_owned());
    assert_eq!(read::<u64>(&[0x81, 0]), refused);
    let duration = |bytes: &[u8]| read::<Duration>(bytes);
    let [nanos, second] = [999_999_999, 1_000_000_000_u32].map(|nanos| bytes(&(3_u64, nanos)));
    assert_eq!(duration(&nanos), Ok(Duration::new(3, 999_999_999)));
    assert_eq!(duration(&second), Err("its header is not in canonical form".to_owned()));
}

#[test]
fn what_is_in_no_list_is_refused() {
    let refused = |from: &[u8], to: &[u8]| {
        let text = bytes(&descriptor());
        let at = text.windows(from.len()).position(|part| part == from).expect("it is there");
        let changed = [&text[..at], to, &text[at + from.len()..]].concat();
        read::<Descriptor>(&changed).expect_err("it is in no list")
    };
    let sequence = bytes(&(1_u64 << 40));
    let op = |op: &[u8]| [&*sequence, op].concat();
    let problem = refused(&op(&bytes(&Op::ReduceScatter)), &op(&bytes(&200_u32)));
    assert!(problem.starts_with("its header cannot be read: "), "{problem}");
    let problem = refused(&3.0_f32.to_le_bytes(), &0.0_f32.to_le_bytes());
    assert!(problem.starts_with("its header cannot be read: "), "nothing is divided by 0");
}

proptest! {
    #[test]
    fn whatever_comes_is_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = read::<DataHeader>(&bytes);
        let _ = end_of(&bytes);
        let _ = read::<Compared>(&bytes);
        let _ = read::<RankState>(&bytes);
    }

    #[test]
    fn changed_headers_are_read_or_refused(at in 0..1000_usize, byte: u8) {
        for end in ends() {
            let mut bytes = end_bytes(1, &end, Rank::new(0));
            let len = bytes.len();
            bytes[at % len] = byte;
            let _ = end_of(&bytes);
        }
        for said in compared() {
            let mut changed = bytes(&said);
            let len = changed.len();
            changed[at % len] = byte;
            if let Ok(said) = read::<Compared>(&changed) {
                assert_eq!(bytes(&said), changed);
            }
        }
    }
}
