//! Writes the traces of a simulated step to files.

use std::error::Error;
use std::path::Path;

use hsdp_simulator::{Costs, Traces, trace};
use hsdp_train::file::{Output, OutputFolder, replace_with};

use super::{SimulateArgs, Simulated};
use crate::model::Model;
use crate::output::{self, cannot_write};
use crate::plan::choices::Choices;

/// Maximum number of ranks with a file of their own.
const MAX_FILES: usize = 4096;
/// Maximum number of actions of all kinds of ranks in a timeline. They take 0.8 GB of memory and of
/// the file together.
const MAX_ACTIONS: u64 = 4_000_000;
/// Maximum number of actions of all ranks in their files, which take 4 GB together.
const MAX_NODES: u64 = 50_000_000;

/// Requested files.
pub(super) struct TraceOutputs {
    timeline: Option<Output>,
    chakra: Option<OutputFolder>,
}

impl TraceOutputs {
    /// Checks that the files can be written.
    ///
    /// # Errors
    /// A text of one line.
    pub(super) fn check(options: &SimulateArgs, choices: &Choices) -> Result<Self, String> {
        let described = Model::file(&choices.model);
        let inputs = [&*described, Path::new(&options.machine)];
        let timeline = output::check(options.trace.as_ref(), &inputs)?;
        if options.json {
            output::check_beside_json(&[&timeline])?;
        }
        let chakra = output::check_folder(options.chakra.as_ref())?;
        if let (Some(folder), Some(file)) = (&chakra, &timeline) {
            folder.differs_from(file).map_err(cannot_write)?;
        }
        Ok(Self { timeline, chakra })
    }
}

/// Writes the requested traces.
pub(super) fn write(
    simulated: &Simulated<'_>,
    outputs: &TraceOutputs,
) -> Result<(), Box<dyn Error>> {
    let Simulated { machine, workload, prediction, .. } = simulated;
    if outputs.timeline.is_none() && outputs.chakra.is_none() {
        return Ok(());
    }
    let order = workload.order(machine);
    let costs = workload.costs(machine)?;
    let actions = order
        .blocks
        .iter()
        .fold(0u64, |sum, it| sum.saturating_add(it.times.saturating_mul(it.actions.len() as u64)));
    let mesh = workload.plan.mesh();
    let ranks = mesh.world_size();
    let kinds = prediction.timing.ranks.len();
    if outputs.timeline.is_some() {
        at_most("kinds of ranks", actions, kinds, MAX_ACTIONS)?;
    }
    if outputs.chakra.is_some() {
        if ranks > MAX_FILES {
            return Err(format!(
                "mesh {mesh} has {ranks} ranks; at most {MAX_FILES} get a trace each"
            )
            .into());
        }
        at_most("ranks", actions, ranks, MAX_NODES)?;
    }
    let traces = Traces { order: &order, spec: workload.plan.spec(), costs: &costs };
    if let Some(file) = &outputs.timeline {
        write_timeline(&traces, &costs, file)?;
    }
    if let Some(folder) = &outputs.chakra {
        write_chakra(&traces, folder)?;
    }
    Ok(())
}

/// Checks the number of actions of all ranks, or of all kinds of ranks, before any file is written.
///
/// # Errors
/// A text of one line, with the numbers.
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
    file: &Output,
) -> Result<(), Box<dyn Error>> {
    let (timing, spans) = trace(traces.order, costs)?;
    let written = file.write(|mut sink| traces.write_timeline(&timing, &spans, &mut sink));
    Ok(written.map_err(cannot_write)?)
}

fn write_chakra(traces: &Traces<'_>, folder: &OutputFolder) -> Result<(), String> {
    let mesh = traces.order.mesh;
    let written = folder.write(|folder| {
        replace_with(&folder.join("groups.json"), |mut sink| {
            traces.write_chakra_groups(&mut sink)
        })?;
        mesh.ranks().try_for_each(|rank| {
            let path = folder.join(format!("step.{rank}.et"));
            replace_with(&path, |mut sink| traces.write_chakra(rank, &mut sink))
        })
    });
    written.map_err(cannot_write)
}
