//! Every collective between threads, by size and ranks, measured as by nccl-tests.
//!
//! ```text
//! cargo bench -p hsdp-benches --bench collectives
//! cargo bench -p hsdp-benches --bench collectives -- --ranks 2,4,8,16 --to 256MiB --samples 5   # everything
//! cargo bench -p hsdp-benches --bench collectives -- --ranks 2,3 --to 64KiB --factor 64 --samples 2 --each 200us
//! ```
//!
//! A size is that of the larger of a rank's two buffers: the output of an all_gather, the input of
//! a reduce_scatter. A time is that of one call and its wait, in a row of calls that all ranks
//! begin together, from the first rank that begins to the last that ends. Calls borrow their
//! buffers and return them, so no call allocates one. Each result is compared with its closed form
//! before it is timed; a wrong result ends the program with status 1.
//!
//! Algorithm bandwidth is size / time. Bus bandwidth multiplies it by a factor that makes it
//! comparable with the bandwidth of a wire, for any number of ranks: the factors are those of
//! <https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md>. Both are of the median. A
//! call that hands its buffers over has no bandwidth: it moves nothing.
//!
//! `benches/peers/collectives.sh` measures Open MPI and gloo beside it. In reading order:
//! `options`, `place` (a rank's part, and its expected result), `case` (a collective with its
//! buffers), `general` and `units` (the collectives), `timing`, `report`.

mod case;
mod general;
mod options;
mod place;
mod report;
mod timing;
mod units;

use std::process::ExitCode;

use hsdp_benches::program;
use hsdp_train::Failure;

use crate::case::Collective;
use crate::options::Options;

fn main() -> ExitCode {
    program::run(|options: Options| measure(&options))
}

fn measure(options: &Options) -> Result<(), Failure> {
    options.check()?;
    report::heading(options)?;
    let asked_for = |it: &&Collective| options.only.is_empty() || options.only.contains(&it.name);
    for collective in general::ALL.iter().chain(&units::ALL).filter(asked_for) {
        for &ranks in &options.ranks {
            for size in options.sizes_of(collective) {
                let place = collective.place(ranks, size);
                report::row(
                    options,
                    collective,
                    place,
                    &timing::measure(options, collective, place).map_err(Failure::Work)?,
                )?;
            }
        }
    }
    Ok(())
}
