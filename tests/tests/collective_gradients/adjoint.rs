//! What goes back is the adjoint of what went forward: `sum of <C(x)_r, g_r>` is `sum of <x_r,
//! C*(g)_r>`, for every linear collective and conversion, exactly, on integers.
//!
//! Each rank's copy of a Replicate value is a variable of its own, and is summed over. All copies
//! of an Invariant value are one variable: all ranks bring the same, get the same back, and it is
//! summed once.

use hsdp::collective::{Collective, Copies, Reducer};
use hsdp::{Axis, Rank, World};
use hsdp_comm::{Channel, Group, Tag};
use hsdp_tests::support::worlds::{mesh, on_ranks};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use Copies::{Invariant, Replicate};

/// What each member of a group applies, and which of its values count once.
struct Case {
    name: String,
    /// By member.
    collectives: Vec<Collective>,
    /// Elements of the inputs, by member.
    lens: Vec<usize>,
    input: Counts,
    output: Counts,
}

/// How often the members' copies count in an inner product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Counts {
    /// Each for itself.
    Each,
    /// Once: they are the same.
    Once,
}

/// What one member has of one case.
struct Member {
    x: Vec<f64>,
    y: Option<Vec<f64>>,
    g: Option<Vec<f64>>,
    back: Vec<f64>,
}

#[test]
fn in_worlds_of_1_to_8() {
    for size in 1..=8 {
        check(size, &|world| world.world_group(Channel::User));
    }
}

/// Groups whose ranks are not their indices.
#[test]
fn in_sub_groups() {
    for members in [vec![4, 1, 3], vec![2, 0], vec![3]] {
        let ranks: Vec<Rank> = members.iter().copied().map(Rank::new).collect();
        check(5, &|world| {
            let mine =
                if ranks.contains(&world.rank()) { ranks.clone() } else { vec![world.rank()] };
            world.group(&mine, Channel::User).expect("a group")
        });
    }
}

#[test]
fn along_both_axes_of_meshes() {
    for (replicate, shard) in [(2, 2), (2, 3), (4, 2)] {
        let mesh = mesh(replicate, shard);
        for axis in [Axis::Replicate, Axis::Shard] {
            check(mesh.world_size(), &|world| {
                world.group(&mesh.group(axis, world.rank()), Channel::User).expect("a group")
            });
        }
    }
}

/// Runs all cases in the groups of a world of `size` ranks, and holds the identity against each
/// group.
fn check(size: usize, group_of: &(impl Fn(&World) -> Group + Sync)) {
    let ranks = on_ranks(size, |world| {
        let group = group_of(&world);
        let cases = cases(group.size());
        let results = cases.iter().enumerate().map(|(number, case)| run(case, number, &group));
        let members: Result<Vec<Member>, hsdp::Error> = results.collect();
        Ok((group.ranks().to_vec(), members?))
    });
    for (rank, (group, _)) in ranks.iter().enumerate() {
        // Whoever is first in a group speaks for it.
        if group[0].index() == rank {
            let members: Vec<&Vec<Member>> =
                group.iter().map(|member| &ranks[member.index()].1).collect();
            for (number, case) in cases(group.len()).iter().enumerate() {
                let members: Vec<&Member> = members.iter().map(|cases| &cases[number]).collect();
                check_identity(case, &members, group.len());
            }
        }
    }
}

fn check_identity(case: &Case, members: &[&Member], size: usize) {
    let name = format!("{} among {size}", case.name);
    let forward: Vec<f64> = members.iter().map(|member| inner(&member.y, &member.g)).collect();
    let back = |member: &&Member| inner(&Some(member.x.clone()), &Some(member.back.clone()));
    let back: Vec<f64> = members.iter().map(back).collect();
    if case.output == Counts::Once {
        assert!(members.iter().all(|member| member.y == members[0].y), "{name}: one output");
    }
    if case.input == Counts::Once {
        assert!(
            members.iter().all(|member| member.back == members[0].back),
            "{name}: one gradient"
        );
    }
    assert_eq!(total(case.output, &forward), total(case.input, &back), "{name}");
}

fn total(counts: Counts, of_members: &[f64]) -> f64 {
    match counts {
        Counts::Each => of_members.iter().sum(),
        Counts::Once => of_members[0],
    }
}

fn inner(one: &Option<Vec<f64>>, other: &Option<Vec<f64>>) -> f64 {
    let one = one.as_deref().unwrap_or(&[]);
    let other = other.as_deref().unwrap_or(&[]);
    assert_eq!(one.len(), other.len());
    one.iter().zip(other).map(|(one, other)| one * other).sum()
}

fn run(case: &Case, number: usize, group: &Group) -> Result<Member, hsdp::Error> {
    let member = group.index();
    let size = group.size();
    // Who must bring the same draws from the same seed.
    let draw = |counts, salt: u64, len| {
        let of = if counts == Counts::Once { 0 } else { member as u64 };
        integers(1000 * number as u64 + 10 * of + salt, size, len)
    };
    let x = draw(case.input, 1, case.lens[member]);
    let collective = &case.collectives[member];
    let (y, backward) = collective.forward(group, Tag::default(), x.clone())?;
    let g = y.as_ref().map(|y| draw(case.output, 2, y.len()));
    let back = backward.gradient(g.clone())?;
    let again = backward.gradient(g.clone())?;
    assert_eq!(back, again, "{}: a second backward is the first", case.name);
    Ok(Member { x, y, g, back })
}

/// Multiples of the number of members, so that an average is an integer, too.
fn integers(seed: u64, members: usize, len: usize) -> Vec<f64> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..len).map(|_| f64::from(rng.random_range(-9_i32..=9)) * members as f64).collect()
}

/// Every linear collective and conversion, with no elements, one, and some that members cannot
/// share evenly.
fn cases(size: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for len in [0, 1, 7] {
        of_any_length(&mut cases, size, len);
        of_parts(&mut cases, size, len);
        all_to_alls(&mut cases, size, len);
    }
    cases
}

fn of_any_length(cases: &mut Vec<Case>, size: usize, len: usize) {
    let mut add = |collective: Collective, input, output| {
        cases.push(Case::same(vec![collective; size], len, input, output));
    };
    for reducer in [Reducer::Sum, Reducer::Avg, Reducer::PreMultiplied(-3.0)] {
        for (output, counts) in [(Replicate, Counts::Each), (Invariant, Counts::Once)] {
            add(Collective::AllReduce { reducer, output }, Counts::Each, counts);
        }
        for root in 0..size {
            add(Collective::Reduce { root, reducer }, Counts::Each, Counts::Each);
        }
    }
    for (output, counts) in [(Replicate, Counts::Each), (Invariant, Counts::Once)] {
        add(Collective::AllGather { output }, Counts::Each, counts);
        for root in 0..size {
            add(Collective::Broadcast { root, output }, Counts::Each, counts);
        }
    }
    for root in 0..size {
        add(Collective::Gather { root }, Counts::Each, Counts::Each);
    }
    add(Collective::Scan, Counts::Each, Counts::Each);
    add(Collective::Share, Counts::Once, Counts::Each);
    add(Collective::Place, Counts::Each, Counts::Each);
    add(Collective::OnlyFirst, Counts::Each, Counts::Each);
    for destinations in permutations(size) {
        add(Collective::Permute { destinations }, Counts::Each, Counts::Each);
    }
    let factors = (0..size).map(|member| Reducer::PreMultiplied(member as f64 - 2.0));
    let own_factors = factors.map(|reducer| Collective::AllReduce { reducer, output: Replicate });
    cases.push(Case::same(own_factors.collect(), len, Counts::Each, Counts::Each));
    transfers(cases, size, len);
}

/// Round a ring, from the last to the first alone, and to nobody.
fn permutations(size: usize) -> [Vec<Option<usize>>; 3] {
    let ring = (0..size).map(|member| Some((member + 1) % size)).collect();
    let mut alone = vec![None; size];
    alone[size - 1] = Some(0);
    [ring, alone, vec![None; size]]
}

/// The last member gives to the first, and those between do something that moves nothing.
fn transfers(cases: &mut Vec<Case>, size: usize, len: usize) {
    if size == 1 {
        return;
    }
    let mut collectives = vec![Collective::Place; size];
    collectives[0] = Collective::Receive { from: size - 1 };
    collectives[size - 1] = Collective::Send { to: 0 };
    cases.push(Case::same(collectives, len, Counts::Each, Counts::Each));
}

fn of_parts(cases: &mut Vec<Case>, size: usize, len: usize) {
    let mut add = |collective: Collective, input, output| {
        cases.push(Case::same(vec![collective; size], len * size, input, output));
    };
    for reducer in [Reducer::Sum, Reducer::Avg, Reducer::PreMultiplied(-3.0)] {
        add(Collective::ReduceScatter { reducer }, Counts::Each, Counts::Each);
    }
    for root in 0..size {
        add(Collective::Scatter { root }, Counts::Each, Counts::Each);
    }
    add(Collective::Slice { input: Replicate }, Counts::Each, Counts::Each);
    add(Collective::Slice { input: Invariant }, Counts::Once, Counts::Each);
}

/// `most` is the most that one member has for another.
fn all_to_alls(cases: &mut Vec<Case>, size: usize, most: usize) {
    let mut rng = ChaCha8Rng::seed_from_u64((size * 10 + most) as u64);
    for _ in 0..3 {
        let counts: Vec<Vec<usize>> =
            (0..size).map(|_| (0..size).map(|_| rng.random_range(0..=most)).collect()).collect();
        let collective = |member: usize| Collective::AllToAll {
            send: counts[member].clone(),
            receive: counts.iter().map(|from| from[member]).collect(),
        };
        cases.push(Case {
            name: format!("all_to_all of {counts:?}"),
            collectives: (0..size).map(collective).collect(),
            lens: counts.iter().map(|counts| counts.iter().sum()).collect(),
            input: Counts::Each,
            output: Counts::Each,
        });
    }
}

impl Case {
    fn same(collectives: Vec<Collective>, len: usize, input: Counts, output: Counts) -> Self {
        let name = format!("{:?} of {len} elements", collectives[0]);
        let lens = vec![len; collectives.len()];
        Self { name, collectives, lens, input, output }
    }
}

/// The cases are all that there is to check: none of the linear ones is missing.
#[test]
fn every_linear_collective_is_tried() {
    let mut tried: Vec<&str> =
        cases(2).iter().flat_map(|case| &case.collectives).map(Collective::name).collect();
    tried.sort_unstable();
    tried.dedup();
    let all = [
        "all_gather",
        "all_reduce",
        "all_to_all",
        "broadcast",
        "gather",
        "only_first",
        "permute",
        "place",
        "recv",
        "reduce",
        "reduce_scatter",
        "scan",
        "scatter",
        "send",
        "share",
        "slice",
    ];
    assert_eq!(tried, all);
}
