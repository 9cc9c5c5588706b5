//! The judge beside a simulator that does one random thing after the other: every timing gives its verdict, on good schedules and on broken ones.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use hsdp_simulator::{ScheduleVerdict, Schedules, judge};
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};

/// An action of a rank. A wait has the name of its issue.
#[derive(Clone, Debug, PartialEq)]
enum Act {
    Issue { name: usize, comm: usize, op: usize, count: u64, stream: u64 },
    Wait(usize),
}

#[derive(Clone, Debug)]
struct World {
    members: Vec<Vec<usize>>,
    kernels: usize,
    lists: Vec<Vec<Act>>,
}

/// The same with waits by index, as the format has them. A wait that comes before its issue is left out.
fn json_of(world: &World) -> Value {
    let list = |acts: &Vec<Act>| -> Value {
        let mut list = Vec::new();
        let mut index_of = BTreeMap::new();
        for act in acts {
            match act {
                Act::Issue { name, comm, op, count, stream } => {
                    index_of.insert(*name, list.len());
                    list.push(json!({"comm": format!("c{comm}"), "op": format!("op{op}"), "dtype": "f32", "count": count, "stream": stream}));
                }
                Act::Wait(name) => list.extend(index_of.get(name).map(|k| json!({"wait": k}))),
            }
        }
        list.into()
    };
    let name = |(comm, ranks)| (format!("c{comm}"), json!(ranks));
    let communicators: serde_json::Map<String, Value> =
        world.members.iter().enumerate().map(name).collect();
    let lists: Vec<Value> = world.lists.iter().map(list).collect();
    json!({"communicators": communicators, "kernels": world.kernels, "schedules": lists})
}

/// Schedules that are good: every rank issues its operations in one global order, on streams by communicator and kind.
fn good() -> impl Strategy<Value = World> {
    let operation = (0..4_usize, 0..2_usize, 1..3_u64, 1..3_u64);
    let waits = prop::collection::vec((any::<Index>(), any::<Index>(), any::<Index>()), 0..12);
    let members = prop::collection::vec(any::<u8>(), 3);
    let shape = (2..5_usize, 0..3_usize, members);
    (shape, prop::collection::vec(operation, 1..9), waits).prop_map(
        |((ranks, kernels, bits), operations, waits)| {
            let subset =
                |bits: &u8| (0..ranks).filter(|rank| bits >> rank & 1 == 1).collect::<Vec<_>>();
            let mut members: Vec<Vec<usize>> = bits.iter().map(subset).collect();
            members.push((0..ranks).collect());
            let mut lists = vec![Vec::new(); ranks];
            for (name, (comm, op, count, streams)) in operations.into_iter().enumerate() {
                let stream = (comm as u64 + op as u64) % streams;
                for rank in &members[comm] {
                    lists[*rank].push(Act::Issue { name, comm, op, count, stream });
                }
            }
            for (rank, of, after) in waits {
                let list = &mut lists[rank.index(ranks)];
                if list.is_empty() {
                    continue;
                }
                let at = of.index(list.len());
                if let Act::Issue { name, .. } = list[at] {
                    let place = at + 1 + after.index(list.len() - at);
                    list.insert(place, Act::Wait(name));
                }
            }
            World { members, kernels, lists }
        },
    )
}

/// Up to three small changes on single ranks.
fn changed() -> impl Strategy<Value = World> {
    let change = (any::<Index>(), any::<Index>(), 0..6_usize, any::<Index>());
    (good(), prop::collection::vec(change, 0..4)).prop_map(|(mut world, changes)| {
        for (rank, at, kind, other) in changes {
            let rank = rank.index(world.lists.len());
            let members = world.members.clone();
            let list = &mut world.lists[rank];
            if list.is_empty() {
                continue;
            }
            let at = at.index(list.len());
            let other_at = other.index(list.len());
            match (kind, &mut list[at]) {
                (0, _) => list.swap(at, other_at),
                (1, Act::Issue { name, .. }) => {
                    let gone = *name;
                    list.retain(|act| !matches!(act, Act::Issue { name, .. } if *name == gone));
                }
                (2, Act::Issue { count, .. }) => *count += 1,
                (3, Act::Issue { stream, .. }) => *stream += 1,
                (4, Act::Issue { comm, .. }) => {
                    let own: Vec<usize> =
                        (0..4).filter(|comm| members[*comm].contains(&rank)).collect();
                    *comm = own[other.index(own.len())];
                }
                (_, act) => {
                    let again = act.clone();
                    list.insert(other_at, again);
                }
            }
        }
        world
    })
}

/// An operation: communicator and number.
type Key = (usize, usize);

/// A simulator without any cleverness: all that can happen next is found anew before each event, and a random one of them happens.
struct Simulator {
    world: Value,
    next: Vec<usize>,
    complete: BTreeSet<Key>,
    mismatched: BTreeSet<Key>,
    random: u64,
}

impl Simulator {
    fn new(world: &Value, seed: u64) -> Self {
        let ranks = world["schedules"].as_array().expect("lists").len();
        let complete = BTreeSet::new();
        let mismatched = BTreeSet::new();
        Self { world: world.clone(), next: vec![0; ranks], complete, mismatched, random: seed }
    }

    fn list(&self, rank: usize) -> &Vec<Value> {
        self.world["schedules"][rank].as_array().expect("a list")
    }

    fn key(&self, rank: usize, index: usize) -> Key {
        let comm = self.list(rank)[index]["comm"].as_str().expect("a name");
        let before = self.list(rank)[..index].iter().filter(|act| act["comm"] == *comm);
        (comm[1..].parse().expect("a number"), before.count())
    }

    /// The issued operations of a rank that are not complete.
    fn open(&self, rank: usize) -> Vec<usize> {
        let issued = (0..self.next[rank]).filter(|at| self.list(rank)[*at]["wait"].is_null());
        issued.filter(|at| !self.complete.contains(&self.key(rank, *at))).collect()
    }

    /// Returns the operations that are under way.
    fn under_way(&self, rank: usize) -> Vec<usize> {
        let mut streams = BTreeSet::new();
        let open = self.open(rank).into_iter();
        let mut heads: Vec<usize> = open
            .filter(|at| streams.insert(self.list(rank)[*at]["stream"].as_u64().expect("a stream")))
            .collect();
        match self.world["kernels"].as_u64().expect("a number") {
            0 => {}
            kernels => heads.truncate(usize::try_from(kernels).expect("small")),
        }
        heads
    }

    /// The operations that are under way on all members, with their calls there.
    fn ready(&self) -> BTreeMap<Key, BTreeSet<String>> {
        let mut calls: BTreeMap<Key, Vec<String>> = BTreeMap::new();
        for rank in 0..self.next.len() {
            for at in self.under_way(rank) {
                let Value::Object(mut act) = self.list(rank)[at].clone() else { unreachable!() };
                act.remove("stream");
                calls.entry(self.key(rank, at)).or_default().push(Value::from(act).to_string());
            }
        }
        let members = |comm: usize| self.world["communicators"][format!("c{comm}")].as_array();
        let all = |((comm, _), calls): &(Key, Vec<String>)| {
            calls.len() == members(*comm).expect("ranks").len()
        };
        let ready = calls.into_iter().filter(all);
        ready.map(|(key, calls)| (key, calls.into_iter().collect())).collect()
    }

    fn host_goes_on(&self, rank: usize) -> bool {
        match self.list(rank).get(self.next[rank]).map(|act| act["wait"].as_u64()) {
            None => false,
            Some(None) => true,
            Some(Some(index)) => {
                self.complete.contains(&self.key(rank, usize::try_from(index).expect("small")))
            }
        }
    }

    /// Does one random thing; false if nothing can happen.
    fn step(&mut self) -> bool {
        let mut ready: Vec<_> = self.ready().into_iter().collect();
        ready.retain(|(key, _)| !self.mismatched.contains(key));
        let hosts: Vec<usize> =
            (0..self.next.len()).filter(|rank| self.host_goes_on(*rank)).collect();
        let count = hosts.len() + ready.len();
        if count == 0 {
            return false;
        }
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let chosen = usize::try_from(self.random >> 33).expect("31 bits") % count;
        match (hosts.get(chosen), ready.get(chosen.wrapping_sub(hosts.len()))) {
            (Some(rank), _) => self.next[*rank] += 1,
            (None, Some((key, calls))) if calls.len() > 1 => _ = self.mismatched.insert(*key),
            (None, Some((key, _))) => _ = self.complete.insert(*key),
            (None, None) => unreachable!("it is one of them"),
        }
        true
    }

    fn outcome(mut self) -> (&'static str, Vec<usize>, BTreeSet<String>) {
        while self.step() {}
        let ranks = 0..self.next.len();
        let is_stuck = |rank: &usize| {
            self.next[*rank] < self.list(*rank).len() || !self.open(*rank).is_empty()
        };
        let open =
            ranks.clone().flat_map(|rank| self.open(rank).into_iter().map(move |at| (rank, at)));
        let name = |(rank, at)| {
            let (comm, number) = self.key(rank, at);
            format!("#{number} of c{comm}")
        };
        let stuck = ranks.filter(is_stuck).collect::<Vec<_>>();
        let open = open.map(name).collect();
        match (self.mismatched.is_empty(), stuck.is_empty()) {
            (false, _) => ("mismatch", Vec::new(), open),
            (true, false) => ("deadlock", stuck, open),
            (true, true) => ("ok", Vec::new(), open),
        }
    }
}

#[test]
fn every_timing_gives_the_verdict_of_the_judge() {
    let mut runner = TestRunner::new_with_rng(
        Config { cases: 1000, failure_persistence: None, ..Config::default() },
        proptest::test_runner::TestRng::deterministic_rng(
            proptest::test_runner::RngAlgorithm::ChaCha,
        ),
    );
    let kinds = RefCell::new(BTreeMap::<(String, bool), usize>::new());
    let seeds = prop::collection::vec(any::<u64>(), 3);
    let outcome = runner.run(&(changed(), seeds), |(world, seeds)| {
        let json = json_of(&world);
        let schedules = Schedules::from_json(&json.to_string()).expect("schedules");
        let verdict = judge(&schedules);
        for seed in seeds {
            let (kind, stuck, open) = Simulator::new(&json, seed).outcome();
            match &verdict {
                ScheduleVerdict::Ok => prop_assert_eq!(kind, "ok"),
                ScheduleVerdict::Mismatch(mismatch) => {
                    prop_assert_eq!(kind, "mismatch");
                    prop_assert!(mismatch.calls.len() > 1);
                }
                ScheduleVerdict::Deadlock(deadlock) => {
                    let ranks: Vec<usize> = deadlock.ranks.iter().map(|it| it.index()).collect();
                    prop_assert_eq!((kind, &ranks), ("deadlock", &stuck), "{}", &verdict);
                    prop_assert!(!deadlock.operations.is_empty());
                    for operation in &deadlock.operations {
                        let is_open = open.iter().any(|open| operation.ends_with(open));
                        prop_assert!(is_open, "{} in {}", operation, &verdict);
                    }
                }
            }
            let key = (kind.to_owned(), world.kernels > 0);
            *kinds.borrow_mut().entry(key).or_default() += 1;
        }
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
    let kinds = kinds.into_inner();
    assert!(kinds.len() == 6 && kinds.values().all(|count| *count > 100), "{kinds:?}");
}
