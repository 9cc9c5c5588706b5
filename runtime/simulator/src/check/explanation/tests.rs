//! Shortest cycles beside all distances.

use proptest::prelude::*;

use super::shortest_cycle;

/// Returns the number of nodes of the shortest cycle, from the distances between all nodes.
fn girth(edges: &[Vec<usize>]) -> Option<usize> {
    let size = edges.len();
    let mut distances = vec![vec![usize::MAX / 2; size]; size];
    for (node, next) in edges.iter().enumerate() {
        next.iter().for_each(|next| distances[node][*next] = 1);
    }
    for over in 0..size {
        for from in 0..size {
            for to in 0..size {
                let around = distances[from][over] + distances[over][to];
                distances[from][to] = distances[from][to].min(around);
            }
        }
    }
    (0..size).map(|node| distances[node][node]).min().filter(|length| *length < usize::MAX / 2)
}

proptest! {
    #[test]
    fn a_cycle_is_one_and_the_shortest(
        edges in (1..12_usize).prop_flat_map(|size| {
            let next = prop::collection::vec(0..size, 0..3);
            prop::collection::vec(next, size)
        }),
    ) {
        let found = shortest_cycle(&edges);
        prop_assert_eq!(found.as_ref().map(Vec::len), girth(&edges));
        for (index, node) in found.iter().flatten().enumerate() {
            let cycle = found.as_ref().expect("it has a node");
            prop_assert!(edges[*node].contains(&cycle[(index + 1) % cycle.len()]));
        }
    }
}

/// With so many edges that not all beginnings are tried.
#[test]
fn a_large_ring_is_found() {
    let size = 100_000;
    let edges: Vec<Vec<usize>> = (0..size).map(|node| vec![(node + 1) % size]).collect();
    assert_eq!(shortest_cycle(&edges).map(|cycle| cycle.len()), Some(size));
}

/// A search from a node that leads nowhere ends at once, however long the cycle is that is known:
/// otherwise this takes an hour.
#[test]
fn nodes_that_lead_nowhere_take_no_time() {
    let size = 1_000_000;
    let ring = (0..size).map(|node| vec![(node + 1) % size]);
    let edges: Vec<Vec<usize>> = ring.chain((0..size).map(|_| Vec::new())).collect();
    assert_eq!(shortest_cycle(&edges).map(|cycle| cycle.len()), Some(size));
}
