//! The printed report.

use std::time::Duration;

use hsdp_benches::times::{least, median};
use hsdp_train::print;
use hsdp_train::stdout::PrintError;

use crate::bare::Bare;
use crate::bytes;
use crate::options::Options;

/// The times of the rounds, of the runtime and of the bare loop.
#[derive(Debug, Default)]
pub(crate) struct Times {
    runtime: Vec<Duration>,
    bare: Vec<Duration>,
}

impl Times {
    pub(crate) fn push(&mut self, runtime: Duration, bare: Duration) {
        self.runtime.push(runtime);
        self.bare.push(bare);
    }
}

pub(crate) fn show(options: &Options, times: &Times) -> Result<(), PrintError> {
    let Options { mesh, units, numel, microbatches, param_dtype, reduce_dtype, .. } = options;
    let Options { mode, full_copies, comm, .. } = options;
    print(format_args!(
        "{comm}, mesh {mesh}, {units} units of {numel} parameters in {param_dtype}, {microbatches} microbatches, \
         {reduce_dtype} wire, {mode}, full copies {full_copies}"
    ))?;
    let bytes = bytes::of_a_step(options);
    let measured = [("hsdp", &times.runtime), ("bare loop", &times.bare)];
    let measured = if Bare::serves(options) { &measured[..] } else { &measured[..1] };
    for (name, times) in measured {
        let [least, median] = [least(times), median(times)].map(|time| time.as_secs_f64());
        let rate = bytes as f64 / least / 1e9;
        print(format_args!(
            "  {name:<10} least {least:.3} s, median {median:.3} s, {rate:.1} GB/s of {:.2} GB",
            bytes as f64 / 1e9
        ))?;
    }
    if !Bare::serves(options) {
        return Ok(());
    }
    let [least, median] =
        [least, median].map(|of| of(&times.runtime).as_secs_f64() / of(&times.bare).as_secs_f64());
    let turns = of_turns(times);
    print(format_args!(
        "  hsdp / bare loop: {least:.3} (least), {median:.3} (median), {turns:.3} (median of the ratios of turns)"
    ))
}

/// The one in the middle of the ratios of neighboring steps: a machine whose memory is faster at
/// times, as one that others share, is so for both.
fn of_turns(times: &Times) -> f64 {
    let turns = times.runtime.iter().zip(&times.bare);
    let mut ratios: Vec<f64> =
        turns.map(|(runtime, bare)| runtime.as_secs_f64() / bare.as_secs_f64()).collect();
    ratios.sort_by(f64::total_cmp);
    ratios.get(ratios.len() / 2).copied().unwrap_or_default()
}
