//! The printed report, and the file of results.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, Write};
use std::time::Duration;

use hsdp_benches::size::Size;
use hsdp_train::file::create_log;
use hsdp_train::print;

use crate::case::Failure;
use crate::options::Options;
use crate::timing::Measured;

/// The columns of the file.
const COLUMNS: &str = "kernel,size_bytes,moved_bytes,row,seconds,copy_seconds";

/// A table on standard output, and a file of all rows where one is wanted.
pub(crate) struct Report {
    file: Option<File>,
}

impl Report {
    pub(crate) fn new(options: &Options) -> Result<Self, Failure> {
        // Rows are written as they come, so that a measurement that is cut off leaves them.
        let file = options.csv.as_deref().map(create_log).transpose();
        let file = file.map_err(|error| Failure::Wrong(format!("cannot write {error}")))?;
        let mut report = Self { file };
        report.line(&COLUMNS)?;
        let names = ["size", "MB moved", "least", "median", "GB/s", "of a copy"];
        let names: String = names.iter().map(|name| format!("{name:>11}")).collect();
        print(format_args!("{:<28}{names}", "kernel"))?;
        Ok(report)
    }

    /// Of a kernel; without a size it is what the host takes to issue it.
    pub(crate) fn row(
        &mut self,
        name: &str,
        size: Option<Size>,
        measured: &Measured,
    ) -> Result<(), Failure> {
        let bytes = measured.bytes;
        for (row, (time, copy)) in measured.times.iter().zip(&measured.copies).enumerate() {
            let size = size.map_or(0, |it| it.0);
            let time = time.as_secs_f64();
            let copy = copy.as_secs_f64();
            self.line(&format_args!("\"{name}\",{size},{bytes},{row},{time:.9},{copy:.9}"))?;
        }
        let [least, median] = [measured.least(), measured.median()];
        let rate = bytes as f64 / median.as_secs_f64() / 1e9;
        let rate = size.map_or("-".to_owned(), |_| format!("{rate:.1}"));
        let size = size.map_or("-".to_owned(), |it| it.to_string());
        let moved = bytes as f64 / 1e6;
        let least = time(least);
        let median = time(median);
        let ratio = measured.of_a_copy();
        print(format_args!(
            "{name:<28}{size:>11}{moved:>11.2}{least:>11}{median:>11}{rate:>11}{ratio:>11.2}"
        ))?;
        Ok(())
    }

    /// How often the host allocates for one launch.
    pub(crate) fn allocations(&self, name: &str, each: f64) -> Result<(), Failure> {
        Ok(print(format_args!("{name:<28} {each:.2} allocations of the host a launch"))?)
    }

    fn line(&mut self, line: &dyn Display) -> Result<(), Failure> {
        self.file.as_mut().map_or(Ok(()), |file| writeln!(file, "{line}")).map_err(failed)
    }
}

fn failed(error: io::Error) -> Failure {
    Failure::Wrong(format!("the file for numbers: {error}"))
}

fn time(time: Duration) -> String {
    let micros = time.as_secs_f64() * 1e6;
    if micros < 1000.0 { format!("{micros:.2} us") } else { format!("{:.3} ms", micros / 1000.0) }
}
