//! Tests that need a CUDA device: kernels against their twins on the CPU, streams, memory, and
//! whole steps.
//!
//! ```text
//! cargo test -p hsdp-tests --features cuda,nccl --test gpu -- --ignored tests/emulator/run.sh
//! cargo test -p hsdp-tests --features cuda,nccl --test gpu -- --ignored   # without a device
//! ```
//!
//! In reading order: `numbers` (what is computed on), `pack`, `sum`, `inspect`, `update`, `muon`
//! (the kernels), `product`, `newton_schulz` (products of matrices), `device_buffers`, `foreign`,
//! `streams`; `units`, `parts` (collectives of ranks that share a device), `steps` (whole steps of
//! models); `nccl`, `nccl_world`; `compile` (which needs no device).

mod apart;
mod compile;
mod device_buffers;
mod foreign;
mod inspect;
mod muon;
#[cfg(feature = "nccl")]
mod nccl;
#[cfg(feature = "nccl")]
mod nccl_world;
mod newton_schulz;
mod numbers;
mod pack;
mod parts;
mod product;
mod steps;
mod streams;
mod sum;
mod units;
mod update;

use std::time::Duration;

use hsdp_kernels::cuda::{Device, DeviceBuffer, Stream};
use hsdp_kernels::memory::CountingAllocator;
use hsdp_kernels::{HostBuffer, Values};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// More than any of these takes.
const PATIENCE: Duration = Duration::from_secs(60);

fn device() -> Device {
    Device::new(0).expect("a CUDA device")
}

fn stream() -> Stream {
    device().stream().expect("a stream")
}

/// A copy on the device.
fn upload(stream: &Stream, values: Values<'_>) -> DeviceBuffer {
    let buffer = DeviceBuffer::new(stream.device(), values.dtype(), values.len(), "a test");
    let mut buffer = buffer.expect("memory");
    buffer.write(stream, values).expect("written");
    buffer
}

/// A copy on the host.
fn download(stream: &Stream, buffer: &DeviceBuffer) -> HostBuffer {
    buffer.read_back(stream, PATIENCE).expect("read")
}

/// The bits of the elements, so that NaN equals itself.
fn bits(values: Values<'_>) -> Vec<u32> {
    match values {
        Values::F32(values) => values.iter().map(|value| value.to_bits()).collect(),
        Values::F16(values) => values.iter().map(|value| value.to_bits().into()).collect(),
        Values::BF16(values) => values.iter().map(|value| value.to_bits().into()).collect(),
    }
}

/// Panics with the first element that differs.
fn assert_same(found: Values<'_>, expected: Values<'_>, what: &str) {
    let found = bits(found);
    let expected = bits(expected);
    assert_eq!(found.len(), expected.len(), "{what}: lengths");
    let differs = found.iter().zip(&expected).position(|(found, expected)| found != expected);
    if let Some(at) = differs {
        panic!("{what}: element {at} has bits {:08x}, not {:08x}", found[at], expected[at]);
    }
}
