//! `hsdp checkpoint ls`.

use std::error::Error;
use std::path::PathBuf;

use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use hsdp_checkpoint::{Error as Unread, Generation, Manifest, STATE, Store, TensorEntry};
use hsdp_train::stderr::in_one_line;
use hsdp_train::{print, print_json};
use serde_json::{Value, json};

use super::{MOST_TRIES, store};
use crate::CommandOutcome;

/// Options of `hsdp checkpoint ls`.
#[derive(Args, Debug)]
pub(crate) struct LsArgs {
    /// Directory of the checkpoints
    #[arg(value_name = "DIR")]
    directory: PathBuf,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Lists all checkpoints except those that a running job removes meanwhile. Returns `Wrong` if a
/// manifest or file sizes are broken, or if a newer version of this program wrote a checkpoint.
pub(crate) fn run(options: &LsArgs) -> Result<CommandOutcome, Box<dyn Error>> {
    let store = store(&options.directory);
    let rows = rows(&store)?;
    if rows.is_empty() {
        return Err(format!("there is no checkpoint in {}", options.directory.display()).into());
    }
    match options.json {
        true => print_json(&Value::Array(rows.iter().map(in_json).collect()))?,
        false => print(format_args!("{}\n{}", table(&rows), unread(&rows)))?,
    }
    let is_well = rows.iter().all(|row| row.opened.is_ok());
    Ok(if is_well { CommandOutcome::Well } else { CommandOutcome::Wrong })
}

/// Reads the checkpoints of a store. If a running job has removed all of them meanwhile, it has
/// saved others, and these are listed instead.
fn rows(store: &Store) -> Result<Vec<ListedCheckpoint>, Unread> {
    let mut rows = Vec::new();
    for _ in 0..MOST_TRIES {
        let steps = store.steps()?;
        let is_empty = steps.is_empty();
        rows = steps
            .into_iter()
            .map(|step| ListedCheckpoint { step, opened: store.open(step) })
            .collect();
        rows.retain(|row| !row.opened.as_ref().is_err_and(Unread::is_absence));
        if is_empty || !rows.is_empty() {
            break;
        }
    }
    Ok(rows)
}

/// A checkpoint, or the reason why it cannot be read.
struct ListedCheckpoint {
    step: u64,
    opened: Result<Generation, Unread>,
}

/// Describes why a checkpoint cannot be read.
fn state(unread: &Unread) -> &'static str {
    match unread {
        Unread::Version { .. } => "newer",
        damage if damage.is_damage() => "broken",
        _ => "unreadable",
    }
}

fn table(rows: &[ListedCheckpoint]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(["step", "mesh", "files", "parameters", "buffers", "bytes", "optimizer"]);
    for ListedCheckpoint { step, opened } in rows {
        table.add_row(match opened {
            Ok(generation) => {
                let manifest = generation.manifest();
                let mesh = manifest.mesh;
                vec![
                    step.to_string(),
                    format!("{}x{}", mesh.replicate, mesh.shard),
                    manifest.files.len().to_string(),
                    parameters(manifest).to_string(),
                    buffers(manifest).to_string(),
                    bytes(manifest).to_string(),
                    optimizer(manifest).unwrap_or("none").escape_debug().to_string(),
                ]
            }
            Err(unread) => vec![step.to_string(), state(unread).to_owned()],
        });
    }
    for column in table.column_iter_mut().filter(|column| [0, 2, 3, 4, 5].contains(&column.index)) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Returns a line for each checkpoint that cannot be read.
fn unread(rows: &[ListedCheckpoint]) -> String {
    let line = |ListedCheckpoint { step, opened }: &ListedCheckpoint| {
        opened.as_ref().err().map(|unread| in_one_line(format_args!("step {step}: {unread}")))
    };
    rows.iter().filter_map(line).collect::<Vec<_>>().join("\n")
}

fn in_json(row: &ListedCheckpoint) -> Value {
    let step = row.step;
    match &row.opened {
        Ok(generation) => {
            let manifest = generation.manifest();
            let mesh = [manifest.mesh.replicate, manifest.mesh.shard];
            json!({
                "step": step, "mesh": mesh, "files": manifest.files.len(),
                "parameters": parameters(manifest), "buffers": buffers(manifest),
                "bytes": bytes(manifest), "optimizer": optimizer(manifest), "user": manifest.user,
            })
        }
        Err(unread) => json!({ "step": step, state(unread): unread.to_string() }),
    }
}

/// Returns the number of elements of all parameters.
fn parameters(manifest: &Manifest) -> u64 {
    let is_parameter = |name: &str| !name.starts_with(STATE) && !manifest.buffers.contains(name);
    let tensors = manifest.tensors.iter().filter(|(name, _)| is_parameter(name));
    tensors.filter_map(|(_, tensor)| tensor.numel()).sum()
}

/// Returns the number of elements of all buffers.
fn buffers(manifest: &Manifest) -> u64 {
    let tensors = manifest.buffers.iter().filter_map(|name| manifest.tensors.get(name));
    tensors.filter_map(TensorEntry::numel).sum()
}

fn bytes(manifest: &Manifest) -> u64 {
    manifest.files.iter().map(|file| file.bytes).sum()
}

fn optimizer(manifest: &Manifest) -> Option<&str> {
    manifest.optimizer.as_ref().map(|optimizer| &*optimizer.kind)
}
