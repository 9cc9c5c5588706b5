//! The printed report.

use std::time::Duration;

use hsdp_train::print;
use hsdp_train::stdout::PrintError;

use crate::case::{Bus, Collective};
use crate::options::{Format, Options};
use crate::place::Place;
use crate::timing::Times;

pub(crate) fn heading(options: &Options) -> Result<(), PrintError> {
    if options.format == Format::Table {
        let names = ["size", "least", "median", "alg GB/s", "bus GB/s"];
        let names: String = names.iter().map(|name| format!("{name:>12}")).collect();
        print(format_args!("{:<22} {:>5}{names}", "collective", "ranks"))?;
    }
    Ok(())
}

pub(crate) fn row(
    options: &Options,
    collective: &Collective,
    place: Place,
    times: &Times,
) -> Result<(), PrintError> {
    let Collective { name, bus, .. } = collective;
    let ranks = place.ranks;
    let Times { least, median } = times;
    let bytes = if *bus == Bus::Empty { 0 } else { place.size().0 };
    if options.format == Format::Lines {
        let [least, median] = [least, median].map(Duration::as_secs_f64);
        return print(format_args!("{name} {ranks} {bytes} {least:.9} {median:.9}"));
    }
    let algorithm = bytes as f64 / median.as_secs_f64() / 1e9;
    let size = if bytes == 0 { String::new() } else { place.size().to_string() };
    let [algorithm, on_bus] = match bus.factor(ranks) {
        Some(factor) => [algorithm, algorithm * factor].map(|rate| format!("{rate:.3}")),
        None => ["-", "-"].map(str::to_owned),
    };
    let [least, median] = [least, median].map(time);
    print(format_args!(
        "{name:<22} {ranks:>5}{size:>12}{least:>12}{median:>12}{algorithm:>12}{on_bus:>12}"
    ))
}

fn time(time: &Duration) -> String {
    let micros = time.as_secs_f64() * 1e6;
    if micros < 1000.0 { format!("{micros:.2} us") } else { format!("{:.3} ms", micros / 1000.0) }
}
