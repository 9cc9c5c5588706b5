use half::{bf16, f16};
use hsdp_sharding::DType;

use super::{cast, unpack};
use crate::buffer::HostBuffer;
use crate::simd::tests::on_all_widths;
use crate::tests::REALS;
use crate::values::{Values, ValuesMut};

/// Numbers that f16 and bf16 must round.
fn thirds(len: usize) -> Vec<f32> {
    (0..len).map(|index| index as f32 / 3.0 - 100.0).collect()
}

fn rounded(dtype: DType, value: f32) -> f32 {
    match dtype {
        DType::F16 => f16::from_f32(value).to_f32(),
        DType::BF16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

#[test]
fn a_cast_rounds_once_and_an_unpack_is_exact() {
    for (len, dtype) in [0, 1, 7, 8, 65, 1000].into_iter().flat_map(|len| REALS.map(|d| (len, d))) {
        let source = thirds(len);
        let expected: Vec<f32> = source.iter().map(|value| rounded(dtype, *value)).collect();
        let result = on_all_widths(|| {
            let mut buffer = HostBuffer::zeros(dtype, len).unwrap();
            cast(buffer.values_mut(), &source);
            let mut unpacked = vec![f32::NAN; len];
            unpack(&mut unpacked, buffer.values());
            unpacked
        });
        assert_eq!(result, expected, "{len} elements of {dtype}");
    }
}

#[test]
fn a_part_of_a_buffer_is_written_in_place() {
    let mut buffer = HostBuffer::zeros(DType::BF16, 6).unwrap();
    cast(buffer.values_mut().slice(2..4), &[1.0, 2.0]);
    assert_eq!(buffer.values().to_f32(), [0.0, 0.0, 1.0, 2.0, 0.0, 0.0]);
}

#[test]
#[should_panic(expected = "lengths of target and source")]
fn a_cast_needs_equal_lengths() {
    cast(ValuesMut::F32(&mut [0.0; 2]), &[1.0; 3]);
}

#[test]
#[should_panic(expected = "lengths of target and source")]
fn an_unpack_needs_equal_lengths() {
    unpack(&mut [0.0; 3], Values::F16(&[f16::ONE; 2]));
}
