use super::*;

fn ranks(numbers: &[usize]) -> Vec<Rank> {
    numbers.iter().copied().map(Rank::new).collect()
}

#[test]
fn coordinates_and_ranks_are_inverse_on_all_meshes_up_to_8x8() {
    for (replicate, shard) in (1..=8).flat_map(|r| (1..=8).map(move |s| (r, s))) {
        let mesh = Mesh::new(replicate, shard).unwrap();
        assert_eq!(mesh.ranks().len(), replicate * shard);
        for rank in mesh.ranks() {
            let place = mesh.coordinate(rank);
            assert_eq!(mesh.rank_at(place), rank);
            assert_eq!(mesh.group(Axis::Shard, rank)[place.on(Axis::Shard)], rank);
            assert_eq!(mesh.group(Axis::Replicate, rank)[place.on(Axis::Replicate)], rank);
        }
    }
}

#[test]
fn groups_partition_the_world() {
    let mesh = Mesh::new(3, 4).unwrap();
    for axis in [Axis::Replicate, Axis::Shard] {
        let mut seen: Vec<Rank> = Vec::new();
        for rank in mesh.ranks().filter(|&rank| mesh.coordinate(rank).on(axis) == 0) {
            let group = mesh.group(axis, rank);
            assert!(group.iter().all(|&member| mesh.group(axis, member) == group));
            seen.extend(group);
        }
        seen.sort();
        assert!(seen.into_iter().eq(mesh.ranks()));
    }
}

#[test]
fn a_2x3_mesh_by_hand() {
    let mesh = Mesh::new(2, 3).unwrap();
    assert_eq!(mesh.world_size(), 6);
    assert_eq!(mesh.axis_size(Axis::Replicate), 2);
    assert_eq!(mesh.axis_size(Axis::Shard), 3);
    let place = Coordinate { replicate_index: 1, shard_index: 2 };
    assert_eq!(mesh.coordinate(Rank::new(5)), place);
    assert_eq!(mesh.group(Axis::Shard, Rank::new(5)), ranks(&[3, 4, 5]));
    assert_eq!(mesh.group(Axis::Replicate, Rank::new(5)), ranks(&[2, 5]));
}

#[test]
fn impossible_meshes_are_refused_with_their_sizes() {
    for (replicate, shard) in [(0, 4), (4, 0), (1 << 16, 1 << 16), (usize::MAX, 2)] {
        let error = Mesh::new(replicate, shard).unwrap_err();
        assert_eq!(error, Error::InvalidMesh { replicate, shard });
    }
    let error = "0x4".parse::<Mesh>().unwrap_err().to_string();
    assert_eq!(
        error,
        "mesh 0x4: each axis needs at least 1 rank, and both together at most 4294967295"
    );
}

#[test]
#[should_panic(expected = "rank 6 is not in the mesh 2x3")]
fn a_rank_outside_has_no_coordinate() {
    let _ = Mesh::new(2, 3).unwrap().coordinate(Rank::new(6));
}

#[test]
#[should_panic(expected = "(0, 3) is not in the mesh 2x3")]
fn a_coordinate_outside_has_no_rank() {
    let place = Coordinate { replicate_index: 0, shard_index: 3 };
    let _ = Mesh::new(2, 3).unwrap().rank_at(place);
}
