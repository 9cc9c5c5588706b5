use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::Channel;
use crate::remote::header::bytes;

/// Ranks in a mesh, which issue one sequence of operations on their rows and columns.
#[derive(Clone, Debug)]
struct Step {
    mesh: (usize, usize),
    /// Of each operation: the channel of the group.
    operations: Vec<Channel>,
    /// By rank: how many operations it has issued, and how many more are done than are known to be.
    ranks: Vec<(usize, usize)>,
}

fn steps() -> impl Strategy<Value = Step> {
    let channel =
        prop_oneof![Just(Channel::Gather), Just(Channel::Reduce), Just(Channel::AllReduce)];
    let operations = proptest::collection::vec(channel, 1..40);
    (1..4_usize, 1..4_usize, operations).prop_flat_map(|(replicas, shards, operations)| {
        let issued = (0..=operations.len(), 0..4_usize);
        let ranks = proptest::collection::vec(issued, replicas * shards);
        ranks.prop_map(move |ranks| Step {
            mesh: (replicas, shards),
            operations: operations.clone(),
            ranks,
        })
    })
}

/// A rank of a step: its calls, in the order of its stream.
#[derive(Clone, Debug, Default)]
struct Issuer {
    groups: Vec<GroupId>,
    stream: VecDeque<DeviceCall>,
    counts: Vec<(GroupId, u64)>,
}

impl Step {
    fn members(&self, channel: Channel, rank: usize) -> Vec<Rank> {
        let (replicas, shards) = self.mesh;
        let column = (0..replicas).map(|row| row * shards + rank % shards);
        let row = (0..shards).map(|at| rank / shards * shards + at);
        let all: Vec<usize> =
            if channel == Channel::AllReduce { column.collect() } else { row.collect() };
        all.into_iter().map(Rank::new).collect()
    }

    fn group(&self, channel: Channel, rank: usize) -> GroupId {
        GroupId::of(&self.members(channel, rank), channel)
    }

    fn issuers(&self) -> Vec<Issuer> {
        let of = |(rank, (issued, _)): (usize, &(usize, usize))| {
            let groups = [Channel::Gather, Channel::Reduce, Channel::AllReduce];
            let groups = groups.map(|channel| self.group(channel, rank)).to_vec();
            let counts = groups.iter().map(|group| (*group, 0)).collect();
            let mut issuer = Issuer { groups, counts, stream: VecDeque::new() };
            let first = self.operations[..*issued].iter().enumerate();
            first.for_each(|(number, channel)| {
                issuer.issue(call(self.group(*channel, rank), number))
            });
            issuer
        };
        self.ranks.iter().enumerate().map(of).collect()
    }
}

/// The call of an operation of the sequence; its group numbers it when it is issued.
fn call(group: GroupId, number: usize) -> DeviceCall {
    let shape = CallShape { op: Op::AllReduce, dtype: DType::F32, count: number };
    let mut hash = [0; 16];
    hash[..8].copy_from_slice(&(number as u64).to_le_bytes());
    DeviceCall { group, index: 0, number: (3, number as u64), hash, shape }
}

impl Issuer {
    fn issue(&mut self, call: DeviceCall) {
        let count = self.counts.iter_mut().find(|(group, _)| *group == call.group);
        let (_, count) = count.expect("a group of the rank");
        self.stream.push_back(DeviceCall { index: *count, ..call });
        *count += 1;
    }
}

/// Runs all streams until none goes on. A call is done if it is the next one of all members.
fn run(issuers: &mut [Issuer]) {
    loop {
        let done = issuers.iter().find_map(|issuer| {
            let next = issuer.stream.front()?;
            let is_next = |other: &&Issuer| {
                other
                    .stream
                    .front()
                    .is_some_and(|it| (it.group, it.index) == (next.group, next.index))
            };
            let mut members = issuers.iter().filter(|other| other.groups.contains(&next.group));
            members.all(|other| is_next(&other)).then(|| next.clone())
        });
        let Some(done) = done else { return };
        for issuer in issuers.iter_mut().filter(|it| it.groups.contains(&done.group)) {
            issuer.stream.pop_front();
        }
    }
}

/// The calls that all ranks state. Each rank does not know of some of its calls that they are done.
fn said(step: &Step, before: &[Issuer], after: &[Issuer]) -> Vec<Calls> {
    let ranks = before.iter().zip(after).zip(&step.ranks);
    let of = |((before, after), (_, unknown)): ((&Issuer, &Issuer), &(usize, usize))| {
        let unfinished = (after.stream.len() + unknown).min(before.stream.len());
        let known = before.stream.len() - unfinished;
        let unfinished = before.stream.iter().skip(known).cloned().collect();
        Calls { counts: before.counts.clone(), unfinished }
    };
    ranks.map(of).collect()
}

/// The others of a rank's groups.
fn peers<'a>(said: &'a [Calls], own: &Calls) -> Vec<&'a Calls> {
    let shares = |other: &&Calls| other.counts.iter().any(|(group, _)| own.count(*group).is_some());
    said.iter().filter(shares).collect()
}

proptest! {
    #[test]
    fn all_calls_are_done_when_a_step_is_drained_and_members_have_made_the_same(step in steps()) {
        let before = step.issuers();
        let mut issuers = before.clone();
        run(&mut issuers);
        let said = said(&step, &before, &issuers);
        for (issuer, own) in issuers.iter_mut().zip(&said) {
            let owed = own.owed(&peers(&said, own)).expect("all of them are described");
            let last = own.unfinished.last().map(|call| call.number);
            prop_assert!(owed.iter().all(|call| Some(call.number) > last), "the order of numbers");
            owed.into_iter().for_each(|call| issuer.issue(call));
        }
        run(&mut issuers);
        for issuer in &issuers {
            prop_assert!(issuer.stream.is_empty(), "{:?} hang", issuer.stream);
            for (group, count) in &issuer.counts {
                let members = issuers.iter().filter(|other| other.groups.contains(group));
                let mut counts = members.flat_map(|other| &other.counts).filter(|(it, _)| it == group);
                prop_assert!(counts.all(|(_, other)| other == count));
            }
        }
    }

    #[test]
    fn calls_read_as_they_were_written(step in steps()) {
        for issuer in step.issuers() {
            let calls = Calls { counts: issuer.counts, unfinished: issuer.stream.into() };
            prop_assert_eq!(calls_of(&bytes(&(5_u64, &calls))), Ok((5, calls)));
        }
    }
}

fn issuer(calls: &[(Channel, usize)]) -> Issuer {
    let group = |channel| GroupId::of(&[Rank::new(0), Rank::new(1)], channel);
    let groups = vec![group(Channel::Gather), group(Channel::Reduce)];
    let counts = groups.iter().map(|group| (*group, 0)).collect();
    let mut issuer = Issuer { groups, counts, stream: VecDeque::new() };
    calls.iter().for_each(|(channel, number)| issuer.issue(call(group(*channel), *number)));
    issuer
}

/// The simulation tells streams that wait for each other from others.
#[test]
fn streams_in_different_orders_hang() {
    let calls = [(Channel::Gather, 0), (Channel::Reduce, 1)];
    let mut issuers = [issuer(&calls), issuer(&[calls[1], calls[0]])];
    run(&mut issuers);
    assert!(issuers.iter().all(|issuer| issuer.stream.len() == 2));
    let mut issuers = [issuer(&calls), issuer(&calls)];
    run(&mut issuers);
    assert!(issuers.iter().all(|issuer| issuer.stream.is_empty()));
}

#[test]
fn a_call_that_no_rank_describes_is_an_error() {
    let ahead = issuer(&[(Channel::Gather, 0)]);
    let behind = issuer(&[]);
    let [ahead, behind] =
        [ahead, behind].map(|issuer| Calls { counts: issuer.counts, unfinished: Vec::new() });
    let problem = behind.owed(&[&ahead]).expect_err("a call is missing");
    assert!(problem.starts_with("no rank describes call 0 of NCCL in group 0x"), "{problem}");
}

#[test]
fn calls_of_other_ranks_wait_for_their_epoch() {
    let mut drains = Drains::default();
    let [one, two] = [1, 2].map(Rank::new);
    let peers = BTreeSet::from([one, two]);
    drains.put(two, 1, Calls::default()).expect("the first of the epoch");
    drains.put(two, 0, Calls::default()).expect("the first of the epoch");
    assert_eq!(drains.missing(0, &peers), [one]);
    assert!(drains.put(two, 0, Calls::default()).is_err());
    drains.put(one, 0, Calls::default()).expect("the first of the epoch");
    assert_eq!(drains.missing(0, &peers), []);
    assert_eq!(drains.take(0).len(), 2);
    assert_eq!(drains.missing(1, &peers), [one]);
}

#[test]
fn a_rank_that_has_left_is_missed_by_the_calls_that_it_has_not_made() {
    let mut drains = Drains::default();
    let rank = Rank::new(1);
    let group = GroupId::of(&[Rank::new(0), rank], Channel::Gather);
    let calls = Calls { counts: vec![(group, 3)], unfinished: Vec::new() };
    assert_eq!(drains.left_before(group, 3), None, "it is there");
    drains.put(rank, ALL_EPOCHS, calls).expect("it leaves once");
    assert_eq!(drains.left_before(group, 2), None);
    assert_eq!(drains.left_before(group, 3), Some(rank));
}

/// A rank that leaves in the midst of a drain aborts its calls: its peers are not to wait for them.
#[test]
fn calls_that_a_leaving_rank_aborts_are_not_among_those_that_it_says_to_have_made() {
    let calls = [(Channel::Gather, 0), (Channel::Reduce, 1), (Channel::Gather, 2)];
    let Issuer { groups, counts, stream } = issuer(&calls);
    let of = |done| Calls {
        counts: counts.clone(),
        unfinished: stream.iter().skip(done).cloned().collect(),
    };
    for (done, expected) in [(3, [2, 1]), (2, [1, 1]), (1, [1, 0]), (0, [0, 0])] {
        let counts = groups.iter().copied().zip(expected).collect();
        assert_eq!(of(done).done(), Calls { counts, unfinished: Vec::new() });
    }
}

#[test]
fn a_rank_that_says_its_calls_of_many_epochs_is_refused() {
    let mut drains = Drains::default();
    let rank = Rank::new(1);
    for epoch in [4, 5, ALL_EPOCHS] {
        drains.put(rank, epoch, Calls::default()).expect("it is one epoch ahead, and leaves");
    }
    let problem = drains.put(rank, 6, Calls::default()).expect_err("it cannot be so far ahead");
    assert!(problem.contains("too many epochs"), "{problem}");
    drains.put(Rank::new(2), 4, Calls::default()).expect("another rank");
    drains.take(4);
    drains.put(rank, 6, Calls::default()).expect("the first is used");
}
