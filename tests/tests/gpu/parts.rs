//! Sums and gathers of the parts of buffers on a device, beside those on the host: ranks are
//! threads that share the device.

use std::ops::Range;
use std::sync::Arc;

use hsdp_comm::{
    Channel, Error, Group, Scaling, Stage, StepFailure, Tag, Ungathered, World, WorldError,
    WorldOptions,
};
use hsdp_kernels::cuda::DeviceBuffer;
use hsdp_kernels::{Divisor, HostBuffer, Values, Wire};
use hsdp_sharding::DType;
use hsdp_tests::support::worlds::{launched, results};

use super::numbers::{DTYPES, of, ordinary};
use super::{assert_same, download, stream, upload};

const SIZES: [usize; 4] = [1, 2, 3, 5];

fn tag(stage: Stage) -> Tag {
    Tag::new(stage).step(3)
}

/// Returns lists of starts of uneven parts (some of them empty), each with the end: at the places
/// that a plan chooses, and anywhere.
pub(crate) fn cuts(members: usize) -> [Arc<[usize]>; 3] {
    let of = |lens: [usize; 5]| -> Arc<[usize]> {
        let ends = lens.into_iter().take(members).scan(0, |end, len| {
            *end += len;
            Some(*end)
        });
        std::iter::once(0).chain(ends).collect()
    };
    [of([0; 5]), of([1024, 1016, 0, 2048, 13]), of([5, 0, 1057, 2, 9001])]
}

fn part(cuts: &[usize], slot: usize) -> Range<usize> {
    cuts[slot]..cuts[slot + 1]
}

fn scalings() -> [Scaling; 3] {
    let by = |divisor: f32| Divisor::new(divisor).expect("a divisor");
    [(Wire::F32, 1.0, 1.0), (Wire::BF16, 2.0, 3.0), (Wire::F16, 8.0, 0.5)]
        .map(|(wire, pre, post)| Scaling { wire, pre: by(pre), post: by(post) })
}

#[test]
#[ignore = "needs a CUDA device"]
fn each_member_sums_its_own_part_to_the_bits_of_the_host() {
    for (size, scaling) in SIZES.into_iter().flat_map(|size| scalings().map(|it| (size, it))) {
        for cuts in cuts(size) {
            let sums = results(size, |world| {
                let group = world.world_group(Channel::AllReduce);
                let tag = tag(Stage::ScatterSums);
                let bytes = || world.ledger().channel(Channel::AllReduce).bytes;
                let mine = ordinary(group.index() as u64, cuts[size]);
                let there = upload(&stream(), Values::F32(&mine));
                let pending = group.reduce_scatter_scaled(tag, Arc::clone(&cuts), mine, scaling);
                let host = pending.and_then(|pending| pending.wait()).expect("summed");
                let on_host = bytes();
                let pending =
                    group.reduce_scatter_scaled_on_device(tag, Arc::clone(&cuts), there, scaling);
                let there = pending.and_then(|pending| pending.wait()).expect("summed");
                assert_eq!(bytes(), on_host + on_host, "bytes of {size} ranks");
                (host, download(&stream(), &there))
            });
            for (slot, (host, there)) in sums.iter().enumerate() {
                let part = part(&cuts, slot);
                let found = there.values().slice(part.clone());
                let what = format!("{scaling:?}, {cuts:?}, rank {slot}");
                assert_same(found, Values::F32(&host[part]), &what);
            }
        }
    }
}

/// Returns a buffer in which only the part of a member has the elements of the whole.
fn own_part(dtype: DType, cuts: &[usize], slot: usize) -> HostBuffer {
    let count = cuts[cuts.len() - 1];
    let part = part(cuts, slot);
    let mut buffer = of(dtype, 100 + slot as u64, count + 3 * slot);
    let whole = of(dtype, 9, count);
    buffer.values_mut().slice(part.clone()).copy_from(whole.values().slice(part));
    buffer
}

/// Checks a buffer that has the parts of all members, or only that of its own.
fn assert_parts(found: &HostBuffer, cuts: &[usize], slot: usize, parts: Range<usize>) {
    let dtype = found.dtype();
    let count = cuts[cuts.len() - 1];
    let whole = of(dtype, 9, count);
    let place = cuts[parts.start]..cuts[parts.end];
    let what = format!("{dtype}, {cuts:?}, rank {slot}");
    assert_same(
        found.values().slice(place.clone()),
        whole.values().slice(place),
        &format!("parts of {what}"),
    );
    let tail = count..count + 3 * slot;
    let before = own_part(dtype, cuts, slot);
    assert_same(
        found.values().slice(tail.clone()),
        before.values().slice(tail),
        &format!("the tail of {what}"),
    );
}

#[test]
#[ignore = "needs a CUDA device"]
fn every_member_gets_the_parts_of_all_and_nothing_behind_them() {
    for (size, dtype) in SIZES.into_iter().flat_map(|size| DTYPES.map(|dtype| (size, dtype))) {
        for cuts in cuts(size) {
            let gathered = results(size, |world| {
                let group = world.world_group(Channel::Gather);
                let tag = tag(Stage::GatherSlices);
                let bytes = || world.ledger().channel(Channel::Gather).bytes;
                let own = own_part(dtype, &cuts, group.index());
                let there = upload(&stream(), own.values());
                let pending = group.gather_parts(tag, Arc::clone(&cuts), own).expect("issued");
                pending.wait().expect("gathered");
                let on_host = bytes();
                let pending = group.gather_parts_on_device(tag, Arc::clone(&cuts), there);
                let there = pending.expect("issued").wait().expect("gathered");
                assert_eq!(bytes(), on_host + on_host, "bytes of {size} ranks");
                download(&stream(), &there)
            });
            for (slot, found) in gathered.iter().enumerate() {
                assert_parts(found, &cuts, slot, 0..size);
            }
        }
    }
}

fn reclaimed(failed: Ungathered<DeviceBuffer>) -> HostBuffer {
    download(&stream(), &failed.reclaim().expect("no thread keeps the buffer"))
}

fn lent(group: &Group, cuts: &[usize]) -> DeviceBuffer {
    upload(&stream(), own_part(DType::BF16, cuts, group.index()).values())
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_buffer_comes_back_from_a_step_that_is_aborted_and_is_gathered_again() {
    let [_, _, cuts] = cuts(3);
    results(3, |world| {
        let group = world.world_group(Channel::Gather);
        let slot = group.index();
        let tag = tag(Stage::GatherSlices);
        let own = lent(&group, &cuts);
        let own = if slot == 1 {
            world.abort_step(StepFailure { step: 3, reason: "it gives up".to_owned() });
            own
        } else {
            let pending = group.gather_parts_on_device(tag, Arc::clone(&cuts), own);
            let failed = pending.and_then(|pending| pending.wait());
            let failed = failed.expect_err("rank 1 does not come");
            assert!(matches!(failed.error, Error::StepAborted { .. }), "{failed:?}");
            failed.reclaim().expect("no thread keeps the buffer")
        };
        assert_parts(&download(&stream(), &own), &cuts, slot, slot..slot + 1);
        assert_eq!(world.next_epoch(), 1);
        let pending = group.gather_parts_on_device(tag, Arc::clone(&cuts), own).expect("issued");
        let gathered = pending.wait().expect("all come");
        assert_parts(&download(&stream(), &gathered), &cuts, slot, 0..3);
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn members_that_cut_in_different_places_all_get_one_error() {
    let call = |world: World| {
        let group = world.world_group(Channel::Gather);
        let slot = group.index();
        let cuts: Arc<[usize]> = if slot == 2 { [0, 8, 8, 20] } else { [0, 8, 9, 20] }.into();
        let tag = tag(Stage::GatherSlices);
        let pending = group.gather_parts_on_device(tag, Arc::clone(&cuts), lent(&group, &cuts));
        let failed = pending.and_then(|pending| pending.wait()).expect_err("cuts differ");
        let error = failed.error.clone();
        assert_parts(&reclaimed(failed), &cuts, slot, slot..slot + 1);
        error
    };
    let ends = launched(3, WorldOptions::default(), call).into_iter();
    let ends: Vec<_> = ends.map(|end| end.expect("no rank panics")).collect();
    assert!(ends.iter().all(|end| *end == ends[0]), "all members get one error");
    assert!(matches!(ends[0], Error::World(WorldError::Mismatch(_))), "{}", ends[0]);
    let said = ends[0].to_string();
    assert!(said.contains("members 0 and 2 cut their buffers in different places"), "{said}");
}

#[test]
#[ignore = "needs a CUDA device"]
fn parts_that_do_not_fit_are_refused_and_the_buffer_comes_back() {
    let world = World::single();
    let group = world.world_group(Channel::Gather);
    let ones = || upload(&stream(), Values::F32(&[1.0; 8]));
    for (cuts, expected) in [
        (&[0, 9][..], "all_gather on rank 0: the buffer has 8 elements, expected at least 9"),
        (&[1, 8], "all_gather on rank 0: the cuts [1, 8] do not ascend from 0"),
    ] {
        let refused = group.gather_parts_on_device(tag(Stage::GatherSlices), cuts.into(), ones());
        let refused = refused.expect_err("they do not fit");
        assert_eq!(refused.error.to_string(), expected);
        assert_eq!(reclaimed(refused), HostBuffer::F32(vec![1.0; 8]));
    }
    let sum = |values, cuts: &[usize]| {
        let tag = tag(Stage::ScatterSums);
        let scaling = Scaling::on(Wire::F32);
        let sum = group.reduce_scatter_scaled_on_device(tag, cuts.into(), values, scaling);
        sum.map(drop).expect_err("they do not fit").to_string()
    };
    let expected = "reduce_scatter on rank 0: the input has 8 elements, expected 7";
    assert_eq!(sum(ones(), &[0, 7]), expected);
    let halves = upload(&stream(), HostBuffer::zeros(DType::F16, 8).expect("memory").values());
    let expected = "reduce_scatter on rank 0: f16 elements: partials are f32";
    assert_eq!(sum(halves, &[0, 8]), expected);
}
