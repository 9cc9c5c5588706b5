mod circles;
mod table;

use std::sync::Arc;
use std::time::{Duration, Instant};

use hsdp_flight::Origin;
use hsdp_sharding::{DType, Rank};

use super::core::{Core, MemberCall, OwnRank};
use super::wait::Ticket;
use super::work::{AnyWork, Queued, Running};
use crate::engine::{
    Alarm, Arrived, Difference, EarlyEnds, Key, Outputs, SharedOperation, WaitClock, from_now,
};
use crate::execute::{Meter, Work};
use crate::lease::{Leased, lend};
use crate::site::Site;
use crate::sync::atomic::Ordering;
use crate::{Channel, Counts, Descriptor, Error, GroupId, Op, Tag, WorldOptions};

fn ranks() -> Arc<[Rank]> {
    [0, 1, 2].map(Rank::new).into()
}

fn descriptor(epoch: u64, count: usize) -> Arc<Descriptor> {
    Arc::new(Descriptor {
        group: GroupId::of(&ranks(), Channel::User),
        channel: Channel::User,
        epoch,
        sequence: 0,
        op: Op::AllGather,
        reduction: None,
        dtype: Some(DType::F32),
        counts: Counts::Each(count),
        root: None,
        peer: None,
        scaling: None,
        tag: Tag::default(),
    })
}

fn operation() -> SharedOperation {
    SharedOperation::new(Key::from(&*descriptor(0, 0)), &ranks(), Origin::now())
}

/// A member arrives, says that it brings so many elements, and brings ten times its slot.
fn arrive(operation: &SharedOperation, slot: usize, count: usize) -> Arrived<usize> {
    operation.arrive(slot, &descriptor(0, count), slot * 10)
}

/// Every member gets all contributions, in the order in which the work got them, and its slot.
struct Listing {
    data_header: Vec<usize>,
}

impl Work for Listing {
    type Gets = (Vec<usize>, usize);

    fn blocks(&self) -> usize {
        1
    }

    fn bytes(&self) -> usize {
        0
    }

    fn run(&self, _block: usize, _meter: &Meter<'_>) {}

    fn finish(self) -> Outputs<(Vec<usize>, usize)> {
        (0..self.data_header.len()).map(|slot| (self.data_header.clone(), slot)).collect()
    }
}

/// The output that a member takes.
fn taken(operation: &SharedOperation, slot: usize) -> Result<(Vec<usize>, usize), Error> {
    operation.take(slot)
}

/// The last member has arrived: does the work.
fn complete(operation: &SharedOperation, arrived: Arrived<usize>) {
    let Arrived::Last(data_header, _) = arrived else { panic!("all are there") };
    operation.succeed(AnyWork::finish(Box::new(Listing { data_header })), None);
}

fn aborted(step: u64) -> Error {
    Error::StepAborted { rank: Rank::new(0), step, reason: "a test".into(), mistake: None }
}

const ALL: [usize; 3] = [0, 10, 20];

#[test]
fn the_last_member_gets_all_contributions_in_slot_order() {
    let operation = operation();
    assert!(matches!(arrive(&operation, 2, 5), Arrived::Waiting));
    let there = operation.attendance().expect("members are missing");
    assert_eq!(there.arrived, [Rank::new(2)]);
    assert_eq!(there.missing, [0, 1].map(Rank::new));
    assert!(matches!(arrive(&operation, 0, 5), Arrived::Waiting));
    let last = arrive(&operation, 1, 5);
    assert!(operation.attendance().is_none());
    assert!(!operation.is_settled());
    complete(&operation, last);
    for slot in 0..3 {
        assert_eq!(taken(&operation, slot), Ok((ALL.to_vec(), slot)));
    }
}

#[test]
fn the_first_that_arrives_says_what_work_it_is() {
    let come = |operation: &SharedOperation, slot, count| {
        operation.arrive(slot, &descriptor(0, count), 5_u8)
    };
    let differing = operation();
    assert!(matches!(arrive(&differing, 2, 5), Arrived::Waiting));
    assert!(matches!(come(&differing, 1, 6), Arrived::Differs(Difference::Descriptor)));
    let alike = operation();
    assert!(matches!(come(&alike, 0, 5), Arrived::Waiting));
    for slot in [1, 2] {
        let arrived = arrive(&alike, slot, 5);
        assert!(matches!(arrived, Arrived::Differs(Difference::Work)), "and all are told so");
    }
    for operation in [differing, alike] {
        operation.fail(&aborted(1));
    }
}

#[test]
fn an_operation_that_is_worked_on_does_not_fail_with_its_epoch() {
    let operation = operation();
    assert!([0, 1].iter().all(|slot| matches!(arrive(&operation, *slot, 5), Arrived::Waiting)));
    let last = arrive(&operation, 2, 5);
    operation.fail_gathering(&aborted(1));
    assert!(!operation.is_settled());
    complete(&operation, last);
    // An end that comes too late changes nothing.
    operation.fail(&aborted(1));
    assert_eq!(taken(&operation, 1), Ok((ALL.to_vec(), 1)));
}

#[test]
fn a_member_that_comes_to_a_failed_operation_is_refused() {
    let operation = operation();
    assert!(matches!(arrive(&operation, 0, 5), Arrived::Waiting));
    operation.fail_gathering(&aborted(1));
    assert!(matches!(arrive(&operation, 1, 5), Arrived::Refused(error) if error == aborted(1)));
    assert_eq!(operation.take::<()>(0), Err(aborted(1)));
    // No thread sleeps on an operation that is settled.
    operation.sleep_until(Instant::now() + Duration::from_secs(60));
}

/// The counts that members want, by slot.
fn counts(operation: &SharedOperation) -> Vec<Option<usize>> {
    let wanted = operation.wanted().expect("members are gathering");
    wanted.iter().map(|it| it.as_ref().map(|it| it.counts.total())).collect()
}

#[test]
fn members_that_disagree_are_told_at_once() {
    let operation = operation();
    assert!(matches!(arrive(&operation, 0, 5), Arrived::Waiting));
    assert!(matches!(arrive(&operation, 2, 6), Arrived::Differs(Difference::Descriptor)));
    assert_eq!(counts(&operation), [Some(5), None, Some(6)]);
}

#[test]
fn a_member_that_comes_after_others_that_disagree_is_told_so_too_and_never_the_last() {
    // The second is preempted before it ends the world.
    for data_header in [[5, 6, 5], [5, 6, 6], [5, 6, 7]] {
        let operation = operation();
        assert!(matches!(arrive(&operation, 0, data_header[0]), Arrived::Waiting));
        assert!(matches!(
            arrive(&operation, 1, data_header[1]),
            Arrived::Differs(Difference::Descriptor)
        ));
        assert!(matches!(
            arrive(&operation, 2, data_header[2]),
            Arrived::Differs(Difference::Descriptor)
        ));
        assert_eq!(counts(&operation), data_header.map(Some), "the table lists all");
        assert!(!operation.is_settled());
        operation.fail_gathering(&aborted(1));
        assert_eq!(operation.failure(), Some(aborted(1)));
        assert_eq!(operation.wanted(), None);
    }
}

#[test]
fn the_first_end_wins_and_old_ones_are_forgotten() {
    let early_ends = EarlyEnds::default();
    assert_eq!(early_ends.check(0), Ok(()));
    assert_eq!(early_ends.end_epoch(0, aborted(1)), aborted(1));
    assert_eq!(early_ends.end_epoch(0, aborted(2)), aborted(1));
    assert_eq!((early_ends.check(0), early_ends.check(1)), (Err(aborted(1)), Ok(())));
    assert!(early_ends.is_aborted(0) && !early_ends.is_aborted(1));
    early_ends.end_epoch(1, aborted(3));
    early_ends.forget_before(1);
    assert_eq!((early_ends.check(0), early_ends.check(1)), (Err(aborted(1)), Err(aborted(3))));
    // An epoch that is long over never comes back, for a thread that slept through it.
    early_ends.forget_before(2);
    assert_eq!((early_ends.check(0), early_ends.check(2)), (Err(aborted(3)), Ok(())));
    assert_eq!(early_ends.end_world(aborted(4)), aborted(4));
    assert_eq!(early_ends.end_world(aborted(5)), aborted(4));
    assert_eq!((early_ends.check(1), early_ends.world_end()), (Err(aborted(4)), Some(aborted(4))));
}

#[test]
fn how_an_old_epoch_ended_never_comes_back() {
    let early_ends = EarlyEnds::default();
    early_ends.end_epoch(0, aborted(1));
    early_ends.end_epoch(1, aborted(2));
    // Two ranks forget at once, the one that looked first comes last.
    early_ends.forget_before(2);
    early_ends.forget_before(1);
    assert_eq!(early_ends.check(1), Err(aborted(2)));
    // A thread that slept through both ends an epoch that is long over.
    assert_eq!(early_ends.end_epoch(0, aborted(3)), aborted(2));
    assert!(!early_ends.is_aborted(0));
    early_ends.forget_before(2);
    assert_eq!((early_ends.check(1), early_ends.check(2)), (Err(aborted(2)), Ok(())));
}

#[test]
fn a_moment_of_any_distance_can_be_named() {
    let options = |late, deadline| WorldOptions {
        late,
        deadline,
        circle_grace: Duration::MAX,
        ..WorldOptions::default()
    };
    let second = Duration::from_secs(1);
    let ever = Duration::MAX;
    assert!(from_now(second) > Instant::now());
    assert!(from_now(ever) > from_now(second));
    let due = |late, deadline| WaitClock::start(&options(late, deadline)).alarm();
    assert_eq!(due(ever, ever), due(second, ever), "a thread that waits looks now and then");
    let soon = Duration::from_millis(100);
    assert!(matches!(due(soon, ever), Alarm::None(left) if left <= soon));
    assert!(matches!(due(Duration::ZERO, ever), Alarm::Late(_)));
    assert_eq!(due(ever, Duration::ZERO), Alarm::Deadline);
}

#[test]
fn an_alarm_rings_again_when_its_period_has_passed_once_more() {
    let ever = Duration::MAX;
    let soon = Duration::from_millis(20);
    let options = |late, circle_grace| WorldOptions {
        late,
        circle_grace,
        deadline: ever,
        ..WorldOptions::default()
    };
    let next = |clock: &mut WaitClock| loop {
        match clock.alarm() {
            Alarm::None(left) => assert!(left <= soon),
            alarm => break (alarm, clock.waited()),
        }
    };
    let mut clock = WaitClock::start(&options(soon, ever));
    for periods in 1..4 {
        let (alarm, waited) = next(&mut clock);
        let Alarm::Late(lateness) = alarm else { panic!("{alarm:?}") };
        assert!(soon * periods <= lateness && lateness <= waited);
    }
    let mut clock = WaitClock::start(&options(ever, soon));
    for periods in 1..4 {
        let (alarm, waited) = next(&mut clock);
        assert!(alarm == Alarm::Circle && soon * periods <= waited);
    }
}

/// A world of three ranks that have done nothing yet.
fn core() -> Arc<Core> {
    Core::new(3, WorldOptions::default())
}

fn gathering(arrived: &[usize]) -> Arc<SharedOperation> {
    let operation = operation();
    for slot in arrived {
        assert!(matches!(arrive(&operation, *slot, 5), Arrived::Waiting));
    }
    Arc::new(operation)
}

fn culprit(core: &Core, operation: &Arc<SharedOperation>) -> Option<usize> {
    let waiter = operation.attendance().map_or(Rank::new(0), |there| there.arrived[0]);
    core.culprit(waiter, operation).map(Rank::index)
}

#[test]
fn work_that_hangs_is_the_doing_of_whose_gradient_is_read() {
    let core = core();
    let awaited = gathering(&[0, 2]);
    let hanging = gathering(&[0, 1]);
    assert!(matches!(arrive(&hanging, 2, 5), Arrived::Last(..)));
    assert_eq!(culprit(&core, &hanging), None, "nothing is being read");
    hanging.readers[2].fetch_add(1, Ordering::Relaxed);
    assert_eq!(culprit(&core, &hanging), Some(2));
    // Rank 1 runs a block of it, and so does not come to another operation.
    let _runs = core.state.record(Rank::new(1)).block_on(&hanging);
    assert_eq!(culprit(&core, &awaited), Some(2));
}

/// Work that owns a buffer. All of its blocks could still be claimed.
struct Owning {
    _buffer: Leased<u8>,
}

impl Work for Owning {
    type Gets = ();

    fn blocks(&self) -> usize {
        1
    }

    fn bytes(&self) -> usize {
        1
    }

    fn run(&self, _block: usize, _meter: &Meter<'_>) {}

    fn finish(self) -> Outputs<()> {
        [(); 3].into_iter().collect()
    }
}

/// A thread that helped has left the work in the queue: the operation for which it waits was
/// settled before.
#[test]
fn a_buffer_comes_back_to_a_member_that_waits_after_the_failure() {
    let core = core();
    let operation = gathering(&[0, 1]);
    let descriptor = descriptor(0, 5);
    assert!(matches!(arrive(&operation, 2, 5), Arrived::Last(..)));
    let (buffer, lease) = lend(7);
    let work = Box::new(Owning { _buffer: buffer });
    let running = Running {
        operation: Arc::clone(&operation),
        descriptor: Arc::clone(&descriptor),
        work,
        blocks: 1,
        due: None,
    };
    core.queue.push(&Arc::new(Queued::new(running, 1)));
    operation.fail(&aborted(1));
    let rank = Rank::new(1);
    let record = Arc::clone(&core.state.records[rank.index()]);
    let own = Arc::new(OwnRank { rank, record, core });
    let site = Site {
        id: descriptor.group,
        channel: descriptor.channel,
        ranks: ranks(),
        slot: 1,
        sequence: Arc::default(),
    };
    let entry = own.record.flight.issue(&descriptor);
    let member = MemberCall { own: &own, site: &site, entry };
    assert_eq!(Ticket::new(member, operation, descriptor).wait::<()>(), Err(aborted(1)));
    assert_eq!(lease.take(), Some(7));
}
