//! `hsdp trace`: explains the flight records of a world.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use hsdp_comm::{Explanation, Finding, FlightRecord, MemberFinding, Presence, explain};
use hsdp_train::file::FileError;
use hsdp_train::stderr::in_one_line;
use hsdp_train::{file, print, print_json};
use serde_json::{Value, json};

use crate::CommandOutcome;

/// Options of `hsdp trace`.
#[derive(Args, Debug)]
pub(crate) struct TraceArgs {
    /// Flight records (rank-N.json, each of at most 64 MiB, together of at most 1 GiB) of one
    /// world, or folders with them
    #[arg(value_name = "DUMP", required = true)]
    dumps: Vec<PathBuf>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Reads and explains the records.
pub(crate) fn run(options: &TraceArgs) -> Result<CommandOutcome, Box<dyn Error>> {
    let mut explanation = explain(&read_records(&options.dumps)?);
    match options.json {
        true => print_json(&in_json(&explanation))?,
        false => {
            // Each end has one line, even if a record has a newline.
            explanation.ends.iter_mut().for_each(|end| end.text = in_one_line(&end.text));
            print(explanation)?;
        }
    }
    Ok(CommandOutcome::Well)
}

/// Returns the whole explanation. Times are in seconds.
fn in_json(explanation: &Explanation) -> Value {
    let ends = explanation.ends.iter().map(|end| json!({ "text": end.text, "ranks": end.ranks }));
    let late = explanation.lateness.as_ref().map(
        |it| json!({ "rank": it.rank, "seconds": seconds(it.late), "operation": *it.operation }),
    );
    let last = explanation.often_last;
    let overwritten = explanation.overwritten.iter();
    json!({
        "text": explanation.to_string(),
        "size": explanation.size,
        "compared": explanation.compared,
        "partly_known": explanation.partly_known,
        "finding": finding(&explanation.finding),
        "slowest": late,
        "often_last": last.map(|it| json!({ "rank": it.rank, "times": it.times, "of": it.of })),
        "ends": ends.collect::<Vec<_>>(),
        "without_record": explanation.without_record,
        "left_out": explanation.left_out,
        "overwritten": overwritten
            .map(|(rank, entries)| json!({ "rank": rank, "entries": entries }))
            .collect::<Vec<_>>(),
    })
}

fn finding(finding: &Finding) -> Value {
    match finding {
        Finding::Nothing => json!({ "kind": "nothing" }),
        Finding::Mismatch { operation, members } => {
            json!({ "kind": "mismatch", "operation": **operation, "members": all(members) })
        }
        Finding::Missing { operation, waiting, waited, absent } => json!({
            "kind": "missing", "operation": **operation, "waiting": waiting,
            "waited": waited.map(seconds), "absent": all(absent),
        }),
        Finding::Unfinished { operation, ranks } => {
            json!({ "kind": "unfinished", "operation": **operation, "ranks": ranks })
        }
    }
}

fn all(members: &[MemberFinding]) -> Vec<Value> {
    members.iter().map(member).collect()
}

fn member(member: &MemberFinding) -> Value {
    let rank = member.rank;
    match &member.presence {
        Presence::Issued(entry) => json!({ "rank": rank, "presence": "issued", "entry": **entry }),
        Presence::NotIssued(last) => {
            let last = last.as_ref().map(|last| {
                let waits_in = last.waits_in.as_deref();
                json!({ "operation": *last.operation, "ago": seconds(last.ago), "waits_in": waits_in })
            });
            json!({ "rank": rank, "presence": "not issued", "last": last })
        }
        Presence::Overwritten => json!({ "rank": rank, "presence": "overwritten" }),
        Presence::NoRecord => json!({ "rank": rank, "presence": "no record" }),
    }
}

fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
}

/// Maximum number of bytes in a record, and in all records together. A record of 1,024 entries has
/// some 300 KB.
const MAX_RECORD: u64 = 64 << 20;
const MAX_BYTES: u64 = 1 << 30;

/// Reads records from the files themselves, and from folders all files with the name of a record.
pub(crate) fn read_records(dumps: &[PathBuf]) -> Result<Vec<FlightRecord>, String> {
    let mut records = Vec::new();
    let mut left = MAX_BYTES;
    for dump in dumps {
        for file in files_of(dump)? {
            records.push(read_one(&file, &mut left)?);
        }
    }
    Ok(records)
}

/// Returns the file itself, or the records of a folder, in order of rank.
fn files_of(dump: &Path) -> Result<Vec<PathBuf>, String> {
    let failed = |error: std::io::Error| format!("{}: {error}", dump.display());
    if !fs::metadata(dump).map_err(failed)?.is_dir() {
        return Ok(vec![dump.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(dump).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if let Some(rank) = rank_of(&path) {
            files.push((rank, path));
        }
    }
    files.sort();
    match files.is_empty() {
        true => Err(format!("{}: there is no rank-N.json in this folder", dump.display())),
        false => Ok(files.into_iter().map(|(_, path)| path).collect()),
    }
}

/// Returns the rank in a name such as `rank-12.json`.
pub(crate) fn rank_of(path: &Path) -> Option<u32> {
    let name = path.file_name()?.to_str()?;
    name.strip_prefix("rank-")?.strip_suffix(".json")?.parse().ok()
}

/// Reads a record of at most `left` bytes, and subtracts its bytes from `left`.
fn read_one(file: &Path, left: &mut u64) -> Result<FlightRecord, String> {
    let text = file::read_text(file, MAX_RECORD.min(*left)).map_err(|error| match error {
        FileError::TooLong { .. } if *left < MAX_RECORD => {
            format!("{error}: all records together have at most {MAX_BYTES}")
        }
        error => error.to_string(),
    })?;
    *left -= text.len() as u64;
    FlightRecord::from_json(&text).map_err(|error| format!("{}: {error}", file.display()))
}
