//! The printed report.

use hsdp_train::print;
use hsdp_train::stdout::PrintError;

use crate::options::Options;

/// A time, with so many ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Point {
    pub(crate) ranks: usize,
    pub(crate) seconds: f64,
}

/// The measured times.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// CPU time of an operation on one rank, by ranks that share memory.
    pub(crate) threads: Vec<Point>,
    /// The same, by ranks with messages between them.
    pub(crate) messages: Vec<Point>,
    /// CPU time of a rank's own thread in an operation by NCCL.
    pub(crate) nccl: Vec<Point>,
    /// Time of an exchange by the control plane.
    pub(crate) exchanges: Vec<Point>,
}

impl Report {
    /// The CPU times, with their names.
    pub(crate) fn operations(&self) -> [(&'static str, &[Point]); 3] {
        [("threads", &self.threads), ("messages", &self.messages), ("NCCL", &self.nccl)]
    }

    pub(crate) fn show(&self, options: &Options) -> Result<(), PrintError> {
        let size = options.size();
        print(format_args!(
            "{} units of {} elements on one row, {} microbatches; {} steps. CPU time of an operation on one rank, in us:",
            size.units, size.numel, size.microbatches, options.repeat
        ))?;
        for (name, points) in self.operations() {
            show(name, points, 1e6)?;
        }
        if let [first, .., last] = &*self.nccl {
            let ranks = last.ranks;
            let times = last.seconds / first.seconds;
            print(format_args!(
                "  NCCL: {times:.2} times as much with {ranks} ranks as with {}",
                first.ranks
            ))?;
        }
        if !self.exchanges.is_empty() {
            print("an exchange of 64 bytes of all ranks by the control plane, in ms:")?;
            show("processes", &self.exchanges, 1e3)?;
        }
        Ok(())
    }
}

fn show(name: &str, points: &[Point], scale: f64) -> Result<(), PrintError> {
    if points.is_empty() {
        return Ok(());
    }
    let times = points.iter().map(|it| format!("{:>9.2} ({})", it.seconds * scale, it.ranks));
    print(format_args!("  {name:<9}{}", times.collect::<String>()))
}
