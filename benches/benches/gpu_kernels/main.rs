//! Every kernel of `hsdp_kernels::cuda` against a copy on the same device, and what the host takes to issue them.
//!
//! ```text
//! cargo bench -p hsdp-benches --features cuda --bench gpu_kernels
//! cargo bench -p hsdp-benches --features cuda --bench gpu_kernels -- --sizes 16MiB --only pack,adamw --csv kernels.csv
//! tests/emulator/run.sh cargo bench -p hsdp-benches --features cuda --bench gpu_kernels -- --smoke   # that it runs
//! ```
//!
//! A size is that of as many elements of f32 as there are: 16 MiB are 4 Mi elements, whatever their dtype. What is moved are
//! the bytes that a kernel reads and writes, each once. Beside each kernel, by turns with it, a copy from one buffer of the device
//! to another is timed that moves as many, and the last column is by how much the kernel is faster than that: 1.00 is as good
//! as a copy. Work buffers are tiled on the device from a small pattern. Before anything is timed, each kernel runs
//! once on few elements, and its result is compared with that of its twin on the CPU, bit for bit.
//!
//! How times are taken: by the host's clock, around a row of many launches. Events of our streams carry no time, and those of
//! the driver could not leave out what the host takes, either: to issue a kernel may take longer than to run it. So a
//! row is issued behind a head, copies that keep the device busy until all of the row is there; the clock runs from the end of the head to the
//! end of the row, and the host looks at both without sleeping. A row whose head was over too early is thrown away, and tried
//! again with a longer one. `inspect` waits for what it has seen: its rows are one call, from its begin to its return, which
//! may be 0.1 ms too long.
//!
//! The rows named `issue` are what the host takes for a launch, of a unit of twelve parameters, without a wait for the device; beside
//! each, as above, what it takes to issue a copy. How often the host allocates for it is said too.
//!
//! `benches/peers/gpu_kernels.py` measures what PyTorch has for the same. In reading order: `options`, `source` (what buffers are
//! made of), `case` (a kernel with its buffers), `pack`, `sum`, `inspect`, `update`, `copy` (which there are), `kernels` (all of
//! them, by name), `timing`, `issue`, `report`.

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
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Elements of the check: several vectors, and no multiple of a block's.
const CHECKED: usize = 20_000;

fn main() -> ExitCode {
    program::run(|options: Options| measure(&options.scaled()).map_err(|it| it.to_string()))
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
