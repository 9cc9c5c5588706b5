//! Cycles of a directed graph.

/// The most edges that searches look at, so that the time stays in proportion to the edges. Searches from all nodes of a graph look at no more than
/// its nodes times its edges.
const MOST: usize = 1 << 22;

/// A cycle: its nodes, each with an edge to the next, and the last with one to the first. `edges[i]` are the nodes that follow node `i`.
///
/// It is a shortest one, unless the searches end at [`MOST`] edges: then it is the shortest that they have found. `None` if there is no cycle.
pub(super) fn shortest(edges: &[Vec<usize>]) -> Option<Vec<usize>> {
    let mut best = any(edges)?;
    let (mut search, mut left) = (Search::new(edges), MOST);
    for start in 0..edges.len() {
        if let Some(cycle) = search.through(start, best.len(), &mut left) {
            best = cycle;
        }
    }
    Some(best)
}

/// Some cycle: the nodes that remain when all that lead to no cycle are taken away have each an edge to another.
fn any(edges: &[Vec<usize>]) -> Option<Vec<usize>> {
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
    let (mut walk, mut at) = (Vec::new(), vec![None; edges.len()]);
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
struct Search<'a> {
    edges: &'a [Vec<usize>],
    /// Of each node, the start of the last search that came to it, and the node before it there.
    seen: Vec<Option<usize>>,
    before: Vec<usize>,
}

impl<'a> Search<'a> {
    fn new(edges: &'a [Vec<usize>]) -> Self {
        Self { edges, seen: vec![None; edges.len()], before: vec![0; edges.len()] }
    }

    /// The shortest cycle through a node, if it has fewer nodes than `fewer`. Each edge that is looked at is taken from those that are `left`.
    fn through(&mut self, start: usize, fewer: usize, left: &mut usize) -> Option<Vec<usize>> {
        let mut level = vec![start];
        for _ in 1..fewer {
            // Nothing else can be reached. Otherwise the search would count on to the length of the cycle that is known.
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

#[cfg(test)]
mod tests;
