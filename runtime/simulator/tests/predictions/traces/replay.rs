//! Replays the nodes of all ranks by their dependencies, durations and groups.

use std::collections::{BTreeMap, BTreeSet};

use super::wire::{COMM_COLL_NODE, COMP_NODE, Node};

/// The nodes of all ranks.
pub(crate) struct Files {
    pub(crate) ranks: Vec<Vec<Node>>,
    /// Group 0 has all ranks.
    pub(crate) groups: BTreeMap<u64, Vec<usize>>,
}

impl Files {
    /// The collectives of a rank, group by group.
    pub(crate) fn collectives(&self, rank: usize) -> BTreeMap<u64, Vec<&Node>> {
        let mut collectives: BTreeMap<u64, Vec<&Node>> = BTreeMap::new();
        for node in self.ranks[rank].iter().filter(|node| node.kind == COMM_COLL_NODE) {
            collectives.entry(node.group()).or_default().push(node);
        }
        collectives
    }

    /// The microseconds until all nodes have ended, if a collective takes its duration from the
    /// time at which all members have come to it, and only dependencies hold nodes up.
    pub(crate) fn time(&self) -> u64 {
        let ends = vec![BTreeMap::new(); self.ranks.len()];
        let mut graph = Graph { files: self, places: self.places(), ends, came: BTreeMap::new() };
        while graph.pass() {}
        graph.end()
    }

    /// By rank and node: its place among the collectives of its group.
    fn places(&self) -> Vec<BTreeMap<u64, usize>> {
        let of_rank = |rank: usize| {
            let groups = self.collectives(rank);
            let all = groups.values().flat_map(|it| it.iter().enumerate());
            all.map(|(place, node)| (node.id, place)).collect()
        };
        (0..self.ranks.len()).map(of_rank).collect()
    }

    /// The same as ASTRA-sim's workload layer does it: a rank has one thread, one device and one
    /// communication at a time, and of the nodes that are free, that with the lowest identifier
    /// begins. `None` if ranks wait for each other.
    pub(crate) fn time_with_one_communication(&self) -> Option<u64> {
        Replay::new(self).run()
    }
}

/// A graph whose nodes get their times.
struct Graph<'a> {
    files: &'a Files,
    places: Vec<BTreeMap<u64, usize>>,
    /// By rank and node.
    ends: Vec<BTreeMap<u64, u64>>,
    /// By group and place: when each member came.
    came: BTreeMap<(u64, usize), BTreeMap<usize, u64>>,
}

impl Graph<'_> {
    /// Gives times to the nodes that can have them. Returns whether there were any.
    fn pass(&mut self) -> bool {
        let mut found = false;
        for (rank, nodes) in self.files.ranks.iter().enumerate() {
            for node in nodes {
                if self.ends[rank].contains_key(&node.id) {
                    continue;
                }
                if let Some(begins) = self.begins(rank, node) {
                    self.ends[rank].insert(node.id, begins + node.duration_micros);
                    found = true;
                }
            }
        }
        found
    }

    fn begins(&mut self, rank: usize, node: &Node) -> Option<u64> {
        let ends = &self.ends[rank];
        let of_deps = node.deps.iter().map(|id| ends.get(id).copied());
        let begins = of_deps.collect::<Option<Vec<u64>>>()?.into_iter().max().unwrap_or(0);
        if node.kind == COMP_NODE {
            return Some(begins);
        }
        let came = self.came.entry((node.group(), self.places[rank][&node.id])).or_default();
        came.insert(rank, begins);
        let all = came.len() == self.files.groups[&node.group()].len();
        all.then(|| came.values().copied().max()).flatten()
    }

    /// When all nodes have ended.
    fn end(&self) -> u64 {
        for (nodes, ends) in self.files.ranks.iter().zip(&self.ends) {
            assert_eq!(nodes.len(), ends.len(), "nodes wait for each other");
        }
        self.ends.iter().flat_map(BTreeMap::values).copied().max().unwrap_or(0)
    }
}

/// The three resources of a rank.
const RESOURCES: usize = 3;

fn resource(node: &Node) -> usize {
    match (node.kind, node.is_cpu_op()) {
        (COMP_NODE, true) => 0,
        (COMP_NODE, false) => 1,
        _ => 2,
    }
}

struct Replay<'a> {
    files: &'a Files,
    places: Vec<BTreeMap<u64, usize>>,
    now: u64,
    /// By rank: nodes that have not begun, and those that have ended.
    left: Vec<BTreeMap<u64, &'a Node>>,
    ended: Vec<BTreeSet<u64>>,
    /// By rank and resource: the node that uses it.
    busy: Vec<[Option<u64>; RESOURCES]>,
    /// Ends: time, rank, node.
    events: BTreeSet<(u64, usize, u64)>,
    came: BTreeMap<(u64, usize), Vec<(usize, u64)>>,
}

impl<'a> Replay<'a> {
    fn new(files: &'a Files) -> Self {
        let ranks = files.ranks.len();
        let left = files.ranks.iter().map(|nodes| nodes.iter().map(|it| (it.id, it)).collect());
        Self {
            files,
            places: files.places(),
            now: 0,
            left: left.collect(),
            ended: vec![BTreeSet::new(); ranks],
            busy: vec![[None; RESOURCES]; ranks],
            events: BTreeSet::new(),
            came: BTreeMap::new(),
        }
    }

    fn run(mut self) -> Option<u64> {
        (0..self.left.len()).for_each(|rank| self.begin(rank));
        while let Some((now, rank, id)) = self.events.pop_first() {
            self.now = now;
            let busy = self.busy[rank].iter_mut().find(|it| **it == Some(id)).expect("it began");
            *busy = None;
            self.ended[rank].insert(id);
            self.begin(rank);
        }
        self.left.iter().all(BTreeMap::is_empty).then_some(self.now)
    }

    /// Begins what is free.
    fn begin(&mut self, rank: usize) {
        let ended = &self.ended[rank];
        let is_free = |node: &&&Node| node.deps.iter().all(|id| ended.contains(id));
        let free: Vec<&Node> = self.left[rank].values().filter(is_free).copied().collect();
        for node in free {
            let busy = &mut self.busy[rank][resource(node)];
            if busy.is_some() {
                continue;
            }
            *busy = Some(node.id);
            self.left[rank].remove(&node.id);
            match node.kind {
                COMP_NODE => {
                    let ends = self.now + node.duration_micros;
                    self.events.insert((ends, rank, node.id));
                }
                _ => self.come(rank, node),
            }
        }
    }

    fn come(&mut self, rank: usize, node: &Node) {
        let group = node.group();
        let place = self.places[rank][&node.id];
        let came = self.came.entry((group, place)).or_default();
        came.push((rank, node.id));
        if came.len() == self.files.groups[&group].len() {
            let ends = self.now + node.duration_micros;
            self.events.extend(came.iter().map(|(rank, id)| (ends, *rank, *id)));
        }
    }
}
