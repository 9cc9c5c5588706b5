//! Every kernel of `hsdp_kernels::cuda` against a copy on the same device, and the time that the
//! host needs to issue them.
//!
//! ```text
//! cargo bench -p hsdp-benches --features cuda --bench gpu_kernels
//! cargo bench -p hsdp-benches --features cuda --bench gpu_kernels -- --sizes 16MiB --only pack,adamw --csv kernels.csv
//! tests/emulator/run.sh cargo bench -p hsdp-benches --features cuda --bench gpu_kernels -- --smoke   # only checks that it runs
//! ```
//!
//! A size counts all elements as f32: 16 MiB are 4 Mi elements, whatever their dtype. The moved
//! bytes are those that a kernel reads and writes, each once. By turns with each kernel, the bench
//! times a copy of as many bytes from one buffer of the device to another. The last column is the
//! speed of the kernel relative to that copy: 1.00 is as fast as the copy. Work buffers are tiled
//! on the device from a small pattern. Before the timing, each kernel runs once on few elements,
//! and its result is compared with that of its twin on the CPU, bit for bit.
//!
//! The host's clock measures a row of many launches. Events of our streams carry no time, and
//! events of the driver with times could not exclude the host's part either: to issue a kernel may
//! take longer than to run it. So each row follows a head, copies that keep the device busy until
//! the whole row is issued. The clock runs from the end of the head to the end of the row, and the
//! host polls both without sleeping. If the head ends too early, the row is discarded and repeated
//! with a longer head. `inspect` waits for its result. So its rows are one call each, from its
//! begin to its return, and may be 0.1 ms too long.
//!
//! The rows named `issue` have the time that the host needs for a launch, for a unit of twelve
//! parameters, without a wait for the device; beside each, as above, the time to issue a copy. They
//! also have the number of allocations on the host.
//!
//! `benches/peers/gpu_kernels.py` measures PyTorch's operations for the same work. In reading
//! order: `options`, `source` (the content of buffers), `case` (a kernel with its buffers), `pack`,
//! `sum`, `inspect`, `update`, `copy` (the kernels), `kernels` (all of them, by name), `timing`,
//! `issue`, `report`.

mod case;
mod copy;
mod inspect;
mod issue;
mod kernels;
mod options;
mod pack;
mod report;
mod source;
mod sum;
mod timing;
mod update;

use std::process::ExitCode;

use hsdp_benches::program;
use hsdp_kernels::cuda::Device;
use hsdp_kernels::memory::CountingAllocator;

use crate::case::Failure;
use crate::copy::Copy;
use crate::kernels::Named;
use crate::options::Options;
use crate::report::Report;
use crate::source::Source;
use crate::timing::Clock;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// Elements of the check: several vectors, and no multiple of a block's.
const CHECKED: usize = 20_000;

fn main() -> ExitCode {
    program::run(|options: Options| measure(&options.scaled()).map_err(hsdp_train::Failure::work))
}

fn measure(options: &Options) -> Result<(), Failure> {
    let device = Device::new(options.device)?;
    device.prepare()?;
    let stream = device.stream()?;
    let source = Source::new(&stream)?;
    let mut report = Report::new(options)?;
    let chosen: Vec<Named> =
        kernels::all().into_iter().filter(|it| options.measures(&it.name)).collect();
    for kernel in &chosen {
        check(kernel, &source)?;
    }
    let mut clock = Clock::new(&source, options)?;
    for size in &options.sizes {
        for kernel in &chosen {
            let mut case = (kernel.make)(&source, size.0 / size_of::<f32>())?;
            let mut copy = Copy::moving(&source, case.bytes())?;
            let measured = clock.measure(&mut *case, &mut copy)?;
            report.row(&kernel.name, Some(*size), &measured)?;
        }
    }
    issue::measure(&source, options, &mut report)
}

/// Compares what one launch writes with what the twin does.
fn check(kernel: &Named, source: &Source<'_>) -> Result<(), Failure> {
    let mut case = (kernel.make)(source, CHECKED)?;
    case.issue(source.stream, 1)?;
    case.check(source).map_err(|failure| failure.of(&kernel.name))
}
