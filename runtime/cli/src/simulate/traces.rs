//! The traces of a simulated step, in files.

use std::error::Error;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use hsdp_simulator::{Costs, Traces, trace};

use super::Simulated;

/// The most ranks that get a file each.
const MAX_FILES: usize = 4096;
/// The most actions of all kinds of ranks in a timeline: together 0.8 GB, of the file and of
/// memory.
const MAX_ACTIONS: u64 = 4_000_000;
/// The most actions of all ranks in their files: together 4 GB.
const MAX_NODES: u64 = 50_000_000;

/// Writes the traces that are asked for.
pub(super) fn write(simulated: &Simulated<'_>) -> Result<(), Box<dyn Error>> {
    let Simulated { options, machine, workload, prediction, .. } = simulated;
    if options.trace.is_none() && options.chakra.is_none() {
        return Ok(());
    }
    let (orders, costs) = (workload.orders(machine), workload.costs(machine)?);
    let blocks = orders.of.values().flat_map(|order| &order.blocks);
    let actions = blocks
        .fold(0u64, |sum, it| sum.saturating_add(it.times.saturating_mul(it.actions.len() as u64)));
    let mesh = workload.plan.mesh();
    let (ranks, kinds) = (mesh.world_size(), prediction.timing.ranks.len());
    if options.trace.is_some() {
        at_most("kinds of ranks", actions, kinds, MAX_ACTIONS)?;
    }
    if options.chakra.is_some() {
        if ranks > MAX_FILES {
            return Err(format!(
                "mesh {mesh} has {ranks} ranks; at most {MAX_FILES} get a trace each"
            )
            .into());
        }
        at_most("ranks", actions, ranks, MAX_NODES)?;
    }
    let traces = Traces { orders: &orders, spec: workload.plan.spec(), costs: &costs };
    if let Some(path) = &options.trace {
        write_timeline(&traces, &costs, path)?;
    }
    if let Some(folder) = &options.chakra {
        write_chakra(&traces, folder)?;
    }
    Ok(())
}

/// Checks the number of actions of all of the ranks, or of all kinds of them, before anything is
/// written.
///
/// # Errors
/// In one line, with the numbers.
fn at_most(what: &str, actions: u64, count: usize, most: u64) -> Result<(), String> {
    let all = actions.saturating_mul(count as u64);
    match all <= most {
        true => Ok(()),
        false => Err(format!(
            "a step of {actions} actions of a rank and {count} {what}, {all} in all; at most {most} are traced"
        )),
    }
}

fn write_timeline(
    traces: &Traces<'_>,
    costs: &dyn Costs,
    path: &Path,
) -> Result<(), Box<dyn Error>> {
    let (timing, spans) = trace(traces.orders, costs)?;
    into_file(path, |sink| traces.write_timeline(&timing, &spans, sink))?;
    Ok(())
}

fn write_chakra(traces: &Traces<'_>, folder: &Path) -> Result<(), String> {
    let mesh = traces.orders.mesh;
    fs::create_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    into_file(&folder.join("groups.json"), |sink| traces.write_chakra_groups(sink))?;
    let write = |rank| {
        let path = folder.join(format!("step.{rank}.et"));
        into_file(&path, |sink| traces.write_chakra(rank, sink))
    };
    mesh.ranks().try_for_each(write)
}

/// Writes a file.
///
/// # Errors
/// In one line, with the path.
pub(crate) fn into_file(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<(), String> {
    let written = File::create(path).and_then(|file| {
        let mut sink = BufWriter::new(file);
        write(&mut sink)?;
        sink.flush()
    });
    written.map_err(|error| format!("{}: {error}", path.display()))
}
