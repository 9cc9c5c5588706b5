//! The shortest reason for a deadlock, in words. CHECK.md, "Explanations".

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU32;

use hsdp_sharding::Rank;

use super::judge::{IssuedAt, JudgeRun, listed};
use super::schedules::ListEnd;

/// More clauses than these are not shown: of a longer explanation, the first and the last ones are.
const SHOWN: usize = 8;

/// The most members without an issue that are looked at. After them, each operation has one more
/// look: where each rank waits for another operation of the world, they are as many as the ranks
/// times the ranks.
const MOST_ABSENT: usize = 1 << 20;

/// Why an operation does not begin on a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Why {
    /// The member never issues it, or its record ends before, or it has no record.
    Never(ListEnd),
    /// The host waits for another operation before.
    NotIssued,
    /// Another operation is the head of the stream.
    Behind,
    /// Others are under way, as many as may be.
    Full,
}

/// Some members on which an operation does not begin, for one reason.
#[derive(Debug)]
struct Obstacle {
    why: Why,
    ranks: Vec<Rank>,
    /// The operation that has to complete before; none if the members never issue it.
    before: Option<u32>,
}

/// The operations that matter, each with what it waits for.
struct Waits<'a> {
    run: &'a JudgeRun<'a>,
    /// First head of each rank, which is under way.
    first_heads: Vec<Option<IssuedAt>>,
    operations: Vec<u32>,
    nodes: HashMap<u32, usize>,
    obstacles: Vec<Vec<Obstacle>>,
    /// The node from which each was found first; of those that hosts wait for, itself.
    found_from: Vec<usize>,
    /// The first node that a member never issues.
    end: Option<usize>,
    /// How many more members without an issue may be looked at.
    absent_left: usize,
}

/// Returns the operations of the shortest explanation, and its words.
pub(super) fn shortest(run: &JudgeRun<'_>) -> (Vec<String>, String) {
    let waits = Waits::of(run);
    let (nodes, is_closed) = waits.shortest();
    let closing = nodes.first().copied().filter(|_| is_closed);
    let operations = nodes.iter().map(|node| waits.named(*node)).collect();
    (operations, waits.words(&nodes, closing))
}

impl<'a> Waits<'a> {
    /// Returns the operations for which hosts wait, and those that these wait for, breadth first;
    /// if no host waits, the heads of all streams come first.
    fn of(run: &'a JudgeRun<'a>) -> Self {
        let mut waits = Self {
            run,
            first_heads: run.first_heads(),
            operations: Vec::new(),
            nodes: HashMap::new(),
            obstacles: Vec::new(),
            found_from: Vec::new(),
            end: None,
            absent_left: MOST_ABSENT,
        };
        let ranks = (0..run.schedules.hosts.len()).map(Rank::new);
        ranks.filter_map(|rank| run.waits(rank)).for_each(|operation| waits.add(operation, None));
        if waits.operations.is_empty() {
            run.heads().for_each(|place| waits.add(place.operation, None));
        }
        while let Some(&operation) = waits.operations.get(waits.obstacles.len()) {
            let node = waits.obstacles.len();
            let obstacles = waits.obstacles_of(operation);
            let before = obstacles.iter().filter_map(|it| it.before);
            before.for_each(|operation| waits.add(operation, Some(node)));
            let is_end = obstacles.iter().any(|it| it.before.is_none());
            waits.end = waits.end.or(is_end.then_some(node));
            waits.obstacles.push(obstacles);
        }
        waits
    }

    fn add(&mut self, operation: u32, from: Option<usize>) {
        let new = self.operations.len();
        if *self.nodes.entry(operation).or_insert(new) == new {
            self.operations.push(operation);
            self.found_from.push(from.unwrap_or(new));
        }
    }

    /// Returns the reasons why an operation does not complete. If members never issue it, no others
    /// are looked for, and those members only for the first such operation: the time stays in
    /// proportion to the actions. Where lists may end early, [`MOST_ABSENT`] has the same purpose.
    fn obstacles_of(&mut self, operation: u32) -> Vec<Obstacle> {
        let run = self.run;
        let hosts = &self.run.schedules.hosts;
        let mut found: BTreeMap<(Why, Option<u32>), Vec<Rank>> = BTreeMap::new();
        let places = run.places(operation);
        let absent = |rank: &&Rank| places.binary_search_by_key(*rank, |place| place.rank).is_err();
        let missing = run.members(operation).len() - places.len();
        if missing > 0 && run.is_whole && self.end.is_some() {
            return Vec::new();
        }
        let looked_at = missing.min(self.absent_left.max(1));
        self.absent_left = self.absent_left.saturating_sub(looked_at);
        for &rank in run.members(operation).iter().filter(absent).take(looked_at) {
            let end = hosts[rank.index()].end;
            let before = run.waits(rank).filter(|_| end != ListEnd::Finished);
            let why = before.map_or(Why::Never(end), |_| Why::NotIssued);
            found.entry((why, before)).or_default().push(rank);
        }
        let places = if missing > 0 && run.is_whole { &[] } else { places };
        for place in places {
            if let Some((why, before)) = self.obstacle_at(place) {
                found.entry((why, Some(before))).or_default().push(place.rank);
            }
        }
        let obstacle = |((why, before), mut ranks): (_, Vec<Rank>)| {
            ranks.sort_unstable();
            Obstacle { why, ranks, before }
        };
        found.into_iter().map(obstacle).collect()
    }

    /// Returns the reason on a member that issues the operation sooner or later.
    fn obstacle_at(&self, place: &IssuedAt) -> Option<(Why, u32)> {
        if !self.run.is_issued(place) {
            return Some((Why::NotIssued, self.run.waits(place.rank)?));
        }
        let head = self.run.head_before(place);
        if head != *place {
            return Some((Why::Behind, head.operation));
        }
        let first = self.first_heads[place.rank.index()]?;
        self.run.is_behind(place).then_some((Why::Full, first.operation))
    }

    /// Returns the nodes of the shortest explanation, and whether the last one waits for the first.
    fn shortest(&self) -> (Vec<usize>, bool) {
        let next = |it: &Obstacle| Some(self.nodes[&it.before?]);
        let edges = self.obstacles.iter().map(|them| them.iter().filter_map(next).collect());
        let cycle = shortest_cycle(&edges.collect::<Vec<_>>());
        match (self.chain(), cycle) {
            // A rank whose record ends might have gone on: only a cycle is a deadlock for certain.
            (Some(chain), Some(cycle)) if self.run.is_whole && chain.len() <= cycle.len() => {
                (chain, false)
            }
            (Some(chain), None) => (chain, false),
            (_, cycle) => (self.turned(cycle.unwrap_or_default()), true),
        }
    }

    /// Returns the shortest chain from an operation that a host waits for, to one that a member
    /// never issues.
    fn chain(&self) -> Option<Vec<usize>> {
        let mut node = self.end?;
        let mut chain = vec![node];
        while self.found_from[node] != node {
            node = self.found_from[node];
            chain.push(node);
        }
        chain.reverse();
        Some(chain)
    }

    /// Returns a cycle with another beginning, so that the last operation waits for the first
    /// through a host, of the lowest rank if there are several.
    fn turned(&self, mut cycle: Vec<usize>) -> Vec<usize> {
        let host = |index: usize| {
            let next = cycle[(index + 1) % cycle.len()];
            let obstacle = self.obstacle(cycle[index], Some(next))?;
            (obstacle.why == Why::NotIssued).then_some((obstacle.ranks[0], index))
        };
        if let Some((_, last)) = (0..cycle.len()).filter_map(host).min() {
            let first = (last + 1) % cycle.len();
            cycle.rotate_left(first);
        }
        cycle
    }

    /// Returns the obstacle by which an operation waits for the next one, or for a member that
    /// never issues it.
    fn obstacle(&self, node: usize, next: Option<usize>) -> Option<&Obstacle> {
        let before = next.map(|next| self.operations[next]);
        self.obstacles[node].iter().find(|it| it.before == before)
    }

    fn words(&self, nodes: &[usize], closing: Option<usize>) -> String {
        let (Some(&first), Some(&last)) = (nodes.first(), nodes.last()) else {
            return String::new();
        };
        let clause = |node: usize, next: Option<usize>| {
            let name = next.map(|next| self.named(next)).unwrap_or_default();
            Some(self.obstacle(node, next)?.clause(self.run, &name))
        };
        let pairs = nodes.windows(2);
        let mut clauses: Vec<String> =
            pairs.filter_map(|pair| clause(pair[0], Some(pair[1]))).collect();
        let ends = self.obstacle(last, closing).filter(|it| it.why == Why::NotIssued);
        let subject = match ends {
            // The hosts that wait for the first operation have not issued the last one.
            Some(it) => {
                clauses.push(it.not_issued());
                waiting(&it.ranks)
            }
            None => {
                clauses.extend(clause(last, closing));
                self.subject(self.operations[first])
            }
        };
        if let Some(more) = clauses.len().checked_sub(SHOWN + 1) {
            let cut = format!("... {} more ...", more + 1);
            clauses.splice(SHOWN / 2..=SHOWN / 2 + more, [cut]);
        }
        format!("{subject} {}, {}", self.named(first), clauses.join(", "))
    }

    /// Returns the ranks that wait for an operation; if there are none, those that have issued it.
    fn subject(&self, operation: u32) -> String {
        let run = self.run;
        let issued = run.places(operation).iter().filter(|place| run.is_issued(place));
        let issued: Vec<Rank> = issued.map(|place| place.rank).collect();
        let waits = |rank: &&Rank| run.waits(**rank) == Some(operation);
        let hosts: Vec<Rank> = issued.iter().filter(waits).copied().collect();
        if hosts.is_empty() { format!("{} issued", listed(&issued)) } else { waiting(&hosts) }
    }

    /// `all_gather #3 of shard0`, in the words of the first member that issues it.
    fn named(&self, node: usize) -> String {
        let schedules = self.run.schedules;
        let call = schedules.operations[self.operations[node] as usize].call;
        schedules.named(&schedules.calls[call as usize].op, self.operations[node])
    }
}

fn waiting(hosts: &[Rank]) -> String {
    format!("{} {} for", listed(hosts), if hosts.len() == 1 { "waits" } else { "wait" })
}

impl Obstacle {
    /// `which rank 1 has not issued: it waits for all_gather #2 of shard1`.
    fn clause(&self, run: &JudgeRun<'_>, before: &str) -> String {
        let ranks = listed(&self.ranks);
        let [s, their, records_end, them, they_wait] = match self.ranks.len() {
            1 => ["s", "its", "record ends", "it", "it waits"],
            _ => ["", "their", "records end", "them", "they wait"],
        };
        match (self.why, run.schedules.kernels.map_or(0, NonZeroU32::get)) {
            (Why::Never(ListEnd::Finished), _) => format!("which {ranks} never issue{s}"),
            (Why::Never(ListEnd::CutOff), _) => {
                format!("which {ranks} had not issued when {their} {records_end}")
            }
            (Why::Never(ListEnd::Unknown), _) => {
                format!("which {ranks} may not have issued: there is no record of {them}")
            }
            (Why::NotIssued, _) => format!("{}: {they_wait} for {before}", self.not_issued()),
            (Why::Behind, _) => format!("which {ranks} issued behind {before}"),
            (Why::Full, 1) => format!("which {ranks} (kernels 1) cannot begin before {before}"),
            (Why::Full, kernels) => format!(
                "which {ranks} (kernels {kernels}) cannot begin before one of those under way, the first of them {before}"
            ),
        }
    }

    fn not_issued(&self) -> String {
        let has = if self.ranks.len() == 1 { "has" } else { "have" };
        format!("which {} {has} not issued", listed(&self.ranks))
    }
}

/// The most edges that searches look at, so that the time stays in proportion to the edges.
/// Searches from all nodes of a graph look at no more than its nodes times its edges.
const MOST_EDGES: usize = 1 << 22;

/// Returns a cycle: its nodes, each with an edge to the next, and the last with one to the first.
/// `edges[i]` are the nodes that follow node `i`.
///
/// It is a shortest one, unless the searches end at [`MOST_EDGES`] edges: then it is the shortest
/// that they have found. `None` if there is no cycle.
fn shortest_cycle(edges: &[Vec<usize>]) -> Option<Vec<usize>> {
    let mut best = any_cycle(edges)?;
    let mut search = CycleSearch::new(edges);
    let mut left = MOST_EDGES;
    for start in 0..edges.len() {
        if let Some(cycle) = search.through(start, best.len(), &mut left) {
            best = cycle;
        }
    }
    Some(best)
}

/// Finds some cycle: the nodes that remain when all that lead to no cycle are taken away have each
/// an edge to another.
fn any_cycle(edges: &[Vec<usize>]) -> Option<Vec<usize>> {
    let mut before = vec![Vec::new(); edges.len()];
    for (node, next) in edges.iter().enumerate() {
        next.iter().for_each(|next| before[*next].push(node));
    }
    let mut left: Vec<usize> = edges.iter().map(Vec::len).collect();
    let mut over: Vec<usize> = (0..edges.len()).filter(|node| left[*node] == 0).collect();
    while let Some(node) = over.pop() {
        for &node in &before[node] {
            left[node] -= 1;
            if left[node] == 0 {
                over.push(node);
            }
        }
    }
    let mut walk = Vec::new();
    let mut at = vec![None; edges.len()];
    let mut node = left.iter().position(|left| *left > 0)?;
    loop {
        if let Some(begin) = at[node].replace(walk.len()) {
            return Some(walk.split_off(begin));
        }
        walk.push(node);
        node = *edges[node].iter().find(|next| left[**next] > 0)?;
    }
}

/// Breadth-first searches, one after the other.
struct CycleSearch<'a> {
    edges: &'a [Vec<usize>],
    /// Start of the last search that came to each node, and the node before it there.
    seen: Vec<Option<usize>>,
    before: Vec<usize>,
}

impl<'a> CycleSearch<'a> {
    fn new(edges: &'a [Vec<usize>]) -> Self {
        Self { edges, seen: vec![None; edges.len()], before: vec![0; edges.len()] }
    }

    /// Returns the shortest cycle through a node, if it has fewer nodes than `fewer`. Each edge
    /// that is looked at is taken from those that are `left`.
    fn through(&mut self, start: usize, fewer: usize, left: &mut usize) -> Option<Vec<usize>> {
        let mut level = vec![start];
        for _ in 1..fewer {
            // Nothing else can be reached. Otherwise the search would count on to the length of the
            // cycle that is known.
            if level.is_empty() {
                return None;
            }
            let mut next_level = Vec::new();
            for node in level {
                *left = left.checked_sub(self.edges[node].len())?;
                for &next in &self.edges[node] {
                    if next == start {
                        return Some(self.path(start, node));
                    }
                    if self.seen[next].replace(start) != Some(start) {
                        self.before[next] = node;
                        next_level.push(next);
                    }
                }
            }
            level = next_level;
        }
        None
    }

    fn path(&self, start: usize, end: usize) -> Vec<usize> {
        let mut path = vec![end];
        let mut node = end;
        while node != start {
            node = self.before[node];
            path.push(node);
        }
        path.reverse();
        path
    }
}
