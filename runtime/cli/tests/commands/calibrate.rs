//! `hsdp calibrate`: a machine that it writes predicts its table, and its errors are one line.

use std::fs;
use std::path::Path;

use crate::folder::Folder;
use crate::program::hsdp;

const STEPS: &str = include_str!("../../../simulator/tests/a100_node_steps.csv");
const ALL_REDUCES: &str = include_str!("../../../simulator/tests/a100_node_all_reduce.csv");
/// The layers and the time of a row come after it.
const ROW: &str = "2,4,1,1024,16,";

/// Returns the message of a calibration that is refused, and writes nothing.
fn refused(folder: &Folder, options: &[&str]) -> String {
    let out = folder.at("machine.toml");
    let told = folder.refused(&[&["calibrate", "--out", &out], options].concat());
    assert!(!Path::new(&out).exists());
    told
}

/// Returns the first line of a table, and those that `keep` accepts.
pub(crate) fn rows(text: &str, keep: impl Fn(&str) -> bool) -> String {
    let kept = text.lines().enumerate().filter(|(number, line)| *number == 0 || keep(line));
    kept.map(|(_, line)| line.to_owned() + "\n").collect()
}

#[test]
fn a_machine_that_is_written_predicts_its_table() {
    let folder = Folder::new();
    let steps = folder.file("steps.csv", &rows(STEPS, |row| row.starts_with("2,")));
    let all_reduces = folder.file("all \"reduces\".csv", ALL_REDUCES);
    let out = folder.at("machine.toml");
    let tables = ["--steps", &steps, "--all-reduce", &all_reduces, "--out", &out];
    let (code, said, told) = hsdp(&[&["calibrate"][..], &tables].concat());
    assert_eq!((code, &*told), (Some(0), ""));
    assert_eq!(said.matches("measured ").count(), 37 + 77, "{said}");
    let numbers = said.lines().filter(|line| line.contains(" = ") && line.contains(" +- "));
    assert_eq!(numbers.count(), 2 + 6, "{said}");
    let machine = fs::read_to_string(&out).expect("written");
    assert_eq!(machine.matches("fitted to 37 rows of steps.csv").count(), 6, "{machine}");
    assert_eq!(machine.matches("fitted to 77 rows of all \"reduces\".csv").count(), 2, "{machine}");
    let (code, against, _) = hsdp(&["simulate", "--against", &steps, "--machine", &out]);
    assert_eq!(code, Some(0));
    let summary = against.trim_end().lines().last().expect("a line");
    assert!(said.contains(&format!("fitted to {summary}:\n")), "{said}\n{summary}");
}

/// Small all-reduces tell nothing of bandwidths.
#[test]
fn numbers_that_a_table_does_not_determine_are_named() {
    let folder = Folder::new();
    let rows = ["gpus,bytes,us", "2,8,44", "2,16,45", "2,32,44", "2,64,45"];
    let table = folder.file("small.csv", &rows.join("\n"));
    let steps = folder.at("steps.csv");
    let message = refused(&folder, &["--all-reduce", &table, "--steps", &steps]);
    let start =
        "hsdp: DIR/small.csv: fit: the measurements do not determine links.machine.efficiency (";
    assert!(message.starts_with(start), "{message}");
}

#[test]
fn tables_that_are_too_large_are_refused() {
    let folder = Folder::new();
    let more = (0..26).map(|row| format!("{ROW}10000,1024,{}\n", 100 + row));
    let table = folder.file("steps.csv", &(rows(STEPS, |_| false) + &more.collect::<String>()));
    assert_eq!(
        refused(&folder, &["--steps", &table]),
        "hsdp: DIR/steps.csv: table, line 27: the rows up to here have 260000 layers: expected at most 250000"
    );
    let missing = refused(&folder, &["--steps", &folder.at("missing.csv")]);
    assert!(missing.starts_with("hsdp: DIR/missing.csv: "), "{missing}");
}

/// Groups of 11 ranks lie on machines of 8 cards in ten ways.
#[test]
fn fits_that_would_take_too_long_are_refused() {
    let folder = Folder::new();
    let header = "gpus,shards,global_batch,micro_batch,width,heads,layers,context,step_ms\n";
    let rows = (0..5).map(|row| format!("9999,11,9999,1,64,4,10000,64,{}\n", 100 + row));
    let table = folder.file("steps.csv", &(header.to_owned() + &rows.collect::<String>()));
    assert_eq!(
        refused(&folder, &["--steps", &table, "--machine", "a100-cluster"]),
        "hsdp: DIR/steps.csv: 5 rows with 500100 units, each counted for each kind of ranks: at most 500000 are fitted"
    );
}
