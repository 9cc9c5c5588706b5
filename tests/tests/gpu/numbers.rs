//! Numbers of all kinds: of every size, on the edges of every dtype, and none at all.

use half::{bf16, f16};
use hsdp_kernels::HostBuffer;
use hsdp_sharding::DType;
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

/// Bits of f32 that roundings and sums trip over: zeros, the least numbers, ties, the greatest of
/// each dtype, infinities, NaN with payloads.
const EDGES: [u32; 20] = [
    0x0000_0000,
    0x8000_0000,
    0x0000_0001,
    0x8000_0001,
    0x007f_ffff,
    0x0080_0000,
    0x3300_0000,
    0x3300_0001,
    0x387f_e000,
    0x3880_1000,
    0x3f80_8000,
    0x3f81_8000,
    0x477f_efff,
    0x477f_f000,
    0x7f7f_ffff,
    0x7f80_0000,
    0xff80_0000,
    0x7f80_0001,
    0x7fc1_2345,
    0xffff_ffff,
];

pub(crate) const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Lengths around vectors of eight, around a block of threads, and some that need several.
pub(crate) const LENGTHS: [usize; 12] = [0, 1, 7, 8, 9, 31, 64, 255, 2048, 2055, 40_000, 100_003];

fn rng(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

/// Any bits at all, every eighth one of the edges.
pub(crate) fn any_bits(seed: u64, len: usize) -> Vec<f32> {
    let mut rng = rng(seed);
    let number = |index: usize| match index % 8 {
        0 => EDGES[rng.random_range(0..EDGES.len())],
        _ => rng.random(),
    };
    (0..len).map(number).map(f32::from_bits).collect()
}

/// As gradients are: finite, of a size like that of 1.
pub(crate) fn ordinary(seed: u64, len: usize) -> Vec<f32> {
    let mut rng = rng(seed);
    (0..len).map(|_| rng.random_range(-2.0..2.0)).collect()
}

/// Elements of a dtype with any bits.
pub(crate) fn of(dtype: DType, seed: u64, len: usize) -> HostBuffer {
    let bits = any_bits(seed, len);
    match dtype {
        DType::F16 => bits
            .iter()
            .map(|it| f16::from_bits((it.to_bits() >> 16) as u16))
            .collect::<Vec<_>>()
            .into(),
        DType::BF16 => bits
            .iter()
            .map(|it| bf16::from_bits((it.to_bits() >> 16) as u16))
            .collect::<Vec<_>>()
            .into(),
        _ => bits.into(),
    }
}
