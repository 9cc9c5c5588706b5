//! The time in which the host issues launches, without a wait for the device.

use std::time::{Duration, Instant};

use hsdp_kernels::cuda::{CudaError, Stream};
use hsdp_kernels::{Fold, memory};
use hsdp_sharding::DType;

use crate::case::{Case, Failure};
use crate::copy::Copy;
use crate::options::Options;
use crate::pack::{Pack, Shape};
use crate::report::Report;
use crate::source::{PATIENCE, Source};
use crate::sum::{Members, Sum};
use crate::timing::Measured;

/// How a row's name begins.
const NAME: &str = "issue";

/// Parameters of a unit, as a transformer block has them.
const PARAMS: usize = 12;

/// Elements of a unit: so few that the device is done before the host.
const LEN: usize = PARAMS * 1024;

/// Launches of a row: all of them have room in a stream of the driver.
const LAUNCHES: u32 = 50;

pub(crate) fn measure(
    source: &Source<'_>,
    options: &Options,
    report: &mut Report,
) -> Result<(), Failure> {
    if !options.measures(NAME) {
        return Ok(());
    }
    let shape = Shape { count: PARAMS, dtypes: &[DType::BF16], flat: DType::BF16 };
    let members = Members { count: 2, wire: DType::BF16, fold: Fold::Add };
    let mut pack = Pack::new(source, shape, LEN)?;
    let mut sum = Sum::new(source, members, LEN)?;
    let mut copy = Copy::moving(source, pack.bytes())?;
    let cases: [(&str, &mut dyn Case); 2] = [("pack", &mut pack), ("sum", &mut sum)];
    for (name, case) in cases {
        let mut times = Vec::new();
        let mut copies = Vec::new();
        // The first row makes events, which later ones use again.
        row(source.stream, case)?;
        let before = memory::allocations();
        row(source.stream, case)?;
        let allocations = memory::allocations().since(before).count;
        for _ in 0..options.samples {
            times.push(row(source.stream, case)?);
            copies.push(row(source.stream, &mut copy)?);
        }
        let name = format!("{NAME}: {name}, {PARAMS} parameters");
        report.row(&name, None, &Measured { bytes: case.bytes(), times, copies })?;
        report.allocations(&name, allocations as f64 / f64::from(LAUNCHES))?;
    }
    Ok(())
}

/// Returns the time that the host takes for a launch. Waits for the device before and afterwards,
/// outside of this time.
fn row(stream: &Stream, case: &mut dyn Case) -> Result<Duration, CudaError> {
    stream.moment()?.wait("what was before a row", PATIENCE)?;
    let began = Instant::now();
    case.issue(stream, LAUNCHES)?;
    let took = began.elapsed();
    stream.moment()?.wait("a row of launches", PATIENCE)?;
    Ok(took / LAUNCHES)
}
