//! Many gradients into one flat buffer.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use hsdp_kernels::cuda::{
    DeviceBuffer, DeviceSlice, FirstFound, Noted, Notes, Packed, WhatWasNoted,
};
use hsdp_kernels::{Divisor, GradientValues, HostBuffer, Values};
use hsdp_sharding::DType;

use super::numbers::{DTYPES, of, ordinary};
use super::{PATIENCE, assert_same, device, download, stream, upload};

/// Elements of parameters, one after the other: more than one launch takes, with every length
/// around a vector, and at the end more than a device has threads.
fn lens() -> impl Iterator<Item = usize> {
    let short = (0..160).map(|index| [1, 5, 8, 13, 31, 32, 33, 700][index % 8] + index);
    short.chain([400_001, 400_007, 400_000])
}

/// Gradients and where they begin: at multiples of 32, with padding between them, and every fifth
/// absent.
fn gradients() -> (Vec<(usize, HostBuffer)>, usize) {
    let mut start = 32;
    let mut gradients = Vec::new();
    for (index, len) in lens().enumerate() {
        if index % 5 != 3 {
            gradients.push((start, of(DTYPES[index % 3], index as u64, len)));
        }
        start += len.next_multiple_of(32);
    }
    (gradients, start + 7)
}

/// Returns the result of the twin.
fn expected(
    gradients: &[(usize, HostBuffer)],
    len: usize,
    wire: DType,
    pre: Divisor,
) -> HostBuffer {
    let mut flat = HostBuffer::zeros(wire, len).expect("memory");
    for (start, gradient) in gradients {
        let range = *start..start + gradient.len();
        hsdp_kernels::pack(flat.values_mut().slice(range), gradient.values(), pre);
    }
    flat
}

#[test]
#[ignore = "needs a CUDA device"]
fn gradients_of_all_dtypes_are_packed_as_the_twin_packs_them() {
    let stream = stream();
    let (gradients, len) = gradients();
    let uploaded: Vec<_> =
        gradients.iter().map(|(start, it)| (*start, upload(&stream, it.values()))).collect();
    let packed: Vec<_> = uploaded
        .iter()
        .map(|(start, gradient)| Packed { gradient: gradient.into(), start: *start })
        .collect();
    for wire in DTYPES {
        for pre in [1.0, 4.0, 3.0] {
            let pre = Divisor::new(pre).expect("a divisor");
            let mut flat = DeviceBuffer::new(&device(), wire, len, "a test").expect("memory");
            let mut noted = Noted::new(&stream).expect("memory");
            let notes = Some(Notes { noted: &mut noted, round: 2 });
            stream.pack(&mut flat, &packed, pre, notes).expect("packed");
            let found = download(&stream, &flat);
            let expected = expected(&gradients, len, wire, pre);
            assert_same(found.values(), expected.values(), &format!("{wire} / {}", pre.value()));
            let first = expected.values().to_f32().iter().position(|value| !value.is_finite());
            let first = first.map(|index| FirstFound { round: 2, index });
            let said = stream.read_noted(&[&noted], PATIENCE).expect("read")[0];
            assert_eq!(said, WhatWasNoted { contribution: first, sum: None });
        }
    }
}

/// A gradient that begins in the midst of another buffer, so that no vector of it is aligned.
#[test]
#[ignore = "needs a CUDA device"]
fn gradients_that_are_not_aligned_are_packed_as_others_are() {
    let stream = stream();
    let len = 1_300_003;
    for dtype in DTYPES {
        let gradient = of(dtype, 3, 1 + len);
        let uploaded = upload(&stream, gradient.values());
        let mut flat = DeviceBuffer::new(&device(), DType::BF16, len, "a test").expect("memory");
        let packed = [Packed { gradient: DeviceSlice::new(&uploaded, 1..1 + len), start: 0 }];
        stream.pack(&mut flat, &packed, Divisor::ONE, None).expect("packed");
        let mut expected = HostBuffer::zeros(DType::BF16, len).expect("memory");
        let values = gradient.values().slice(1..1 + len);
        hsdp_kernels::pack(expected.values_mut(), values, Divisor::ONE);
        let found = download(&stream, &flat);
        assert_same(found.values(), expected.values(), &format!("{dtype}"));
    }
}

/// The least numbers that are infinite on each wire, far behind others that are not.
#[test]
#[ignore = "needs a CUDA device"]
fn one_number_that_overflows_is_found_behind_a_million_that_do_not() {
    let stream = stream();
    let len = 1_300_003;
    let at = 900_003;
    let least = [f32::INFINITY, 65520.0, f32::from_bits(0x7f7f_8000)];
    for (wire, least) in DTYPES.into_iter().zip(least) {
        for (value, expected) in [(least, Some(at)), (least.next_down(), None)] {
            let mut values = ordinary(1, len);
            values[at] = value;
            let gradient = upload(&stream, Values::F32(&values));
            let mut flat = DeviceBuffer::new(&device(), wire, len, "a test").expect("memory");
            let mut noted = Noted::new(&stream).expect("memory");
            let packed = [Packed { gradient: (&gradient).into(), start: 0 }];
            let notes = Some(Notes { noted: &mut noted, round: 0 });
            stream.pack(&mut flat, &packed, Divisor::ONE, notes).expect("packed");
            let said = stream.read_noted(&[&noted], PATIENCE).expect("read")[0];
            let found = said.contribution.map(|first| first.index);
            assert_eq!(found, expected, "{value:e} on {wire}");
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn what_does_not_fit_is_refused_by_name() {
    let stream = stream();
    let gradient = upload(&stream, of(DType::F32, 1, 40).values());
    let mut flat = DeviceBuffer::new(&device(), DType::BF16, 64, "a test").expect("memory");
    let packed = [Packed { gradient: (&gradient).into(), start: 32 }];
    let refused = stream.pack(&mut flat, &packed, Divisor::ONE, None).expect_err("it is too long");
    let said = "pack: entry 0 (elements 32..72 of 64) reaches beyond the end";
    assert_eq!(refused.to_string(), said);
}

/// A gradient of 8 elements on the host, which visits this many elements each time.
#[derive(Debug)]
struct Lending(Vec<usize>);

impl GradientValues for Lending {
    fn len(&self) -> usize {
        8
    }

    fn read(&self, _: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        for lent in &self.0 {
            // It hides a panic of the visit, too.
            let visited = catch_unwind(AssertUnwindSafe(|| visit(Values::F32(&vec![1.0; *lent]))));
            drop(visited);
        }
    }
}

/// A gradient that is not copied would stand for zeros.
#[test]
#[ignore = "needs a CUDA device"]
fn a_gradient_that_is_not_lent_once_and_whole_is_refused() {
    let stream = stream();
    let mut flat = DeviceBuffer::new(&device(), DType::F32, 8, "a test").expect("memory");
    let mut pack = |lends: &[usize]| {
        let gradient = Lending(lends.to_vec());
        let gradients: [(usize, Option<&dyn GradientValues>); 1] = [(0, Some(&gradient))];
        catch_unwind(AssertUnwindSafe(|| {
            stream.pack_gradients(&mut flat, &gradients, Divisor::ONE, None)
        }))
    };
    for lends in [&[][..], &[8, 8], &[7], &[7, 8]] {
        assert!(pack(lends).is_err(), "{lends:?}");
    }
    pack(&[8]).expect("it is lent once").expect("packed");
}
