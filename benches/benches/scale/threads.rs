//! Ranks that are threads of this process.

use std::sync::Barrier;
use std::time::Duration;

use hsdp::{ModelOptions, World};
use hsdp_benches::stopwatch::Stopwatch;
use hsdp_comm::{Between, WorldOptions, launch};
use hsdp_train::Failure;
use parking_lot::Mutex;

use crate::options::Options;
use crate::report::Point;
use crate::steps::{mesh, of_process, operations, run};

/// The time that a step may take on a machine with few cores.
const DEADLINE: Duration = Duration::from_secs(600);

/// The CPU time of an operation, on one rank: that of the whole process, its share of exchanges and
/// of worker threads included.
pub(crate) fn operation(
    between: Between,
    ranks: usize,
    options: &Options,
) -> Result<Point, Failure> {
    let of_world = WorldOptions { between, deadline: DEADLINE, ..WorldOptions::default() };
    let model = ModelOptions::on(mesh(ranks)?);
    let barrier = Barrier::new(ranks);
    let began = Mutex::new(Duration::ZERO);
    // The last step ends with an agreement of all ranks, and the first begins for none before the
    // clock is read.
    let ran = launch(ranks, of_world, |world: World| {
        let begin = || {
            if barrier.wait().is_leader() {
                *began.lock() = of_process();
            }
            barrier.wait();
            Ok(())
        };
        let ran = run(world, options, model.clone(), begin, Stopwatch::still());
        barrier.wait();
        ran.map(|_| of_process())
    });
    let mut ended = Duration::ZERO;
    for rank in ran {
        let at = rank.map_err(Failure::work)?;
        ended = ended.max(at);
    }
    let of_all = ended.saturating_sub(*began.lock()).as_secs_f64();
    let calls = f64::from(operations(options)) * ranks as f64;
    Ok(Point { ranks, seconds: of_all / calls })
}
