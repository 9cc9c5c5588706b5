//! Every collective of the local flavour, by size and ranks, as nccl-tests measure them.
//!
//! ```text
//! cargo bench -p hsdp-benches --bench collectives
//! cargo bench -p hsdp-benches --bench collectives -- --ranks 2,4,8,16 --to 256MiB --samples 5   # all of it
//! cargo bench -p hsdp-benches --bench collectives -- --ranks 2,3 --to 64KiB --factor 64 --samples 2 --each 200us
//! ```
//!
//! A size is that of the larger of a rank's two buffers: the output of an all_gather, the input of a reduce_scatter. A time is
//! that of one call and its wait, in a row of calls that all ranks begin together, from the first that begins to the last that
//! ends. Buffers are lent and come back, so that no call makes any. Each result is compared with its closed form before it is timed;
//! one that is wrong ends the program with status 1.
//!
//! Algorithm bandwidth is size by time. Bus bandwidth is that times what makes it comparable with a wire's, whatever the number
//! of ranks: the factors are those of <https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md>. Both are of the
//! median. What hands its buffers over has none: nothing is moved.
//!
//! `benches/peers/collectives.sh` measures Open MPI and gloo beside it. In reading order: `options`, `place` (a rank's
//! part, and what must come out), `case` (a collective with its buffers), `general` and `units` (which there are), `timing`,
//! `report`.

mod case;
mod general;
mod options;
mod place;
mod report;
mod timing;
mod units;

use std::process::ExitCode;

use hsdp_benches::program;

use crate::case::Collective;
use crate::options::Options;

fn main() -> ExitCode {
    program::run(|options: Options| measure(&options))
}

fn measure(options: &Options) -> Result<(), String> {
    report::heading(options);
    let asked_for = |it: &&Collective| options.only.is_empty() || options.only.contains(&it.name);
    for collective in general::ALL.iter().chain(&units::ALL).filter(asked_for) {
        for &ranks in &options.ranks {
            for size in options.sizes_of(collective) {
                let place = collective.place(ranks, size);
                report::row(
                    options,
                    collective,
                    place,
                    &timing::measure(options, collective, place)?,
                );
            }
        }
    }
    Ok(())
}
