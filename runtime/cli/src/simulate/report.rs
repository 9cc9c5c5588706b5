//! Formats a simulated step as text.

use std::iter;

use hsdp_simulator::{Level, RankTiming, Share};
use hsdp_train::stderr::in_one_line;
use hsdp_train::stdout::table;

use super::Simulated;
use crate::machine::memory_of;

/// Returns the tables of time and memory.
pub(super) fn text(simulated: &Simulated<'_>) -> String {
    let parts = [heading(simulated), times(simulated), links(simulated), memory(simulated)];
    parts.join("\n")
}

fn heading(simulated: &Simulated<'_>) -> String {
    let Simulated { choices, machine, workload, prediction, .. } = simulated;
    let (mesh, step) = (workload.plan.mesh(), prediction.timing.step);
    let ranks = mesh.world_size();
    let speed = prediction.tokens_per_second();
    format!(
        "{} on {}, mesh {mesh}: a step of {} tokens takes {step}\n\
         {speed:.0} tokens/s, {:.1} on each of {ranks} ranks; model flops utilisation {:.1} %",
        in_one_line(&choices.model),
        in_one_line(&machine.name),
        prediction.tokens,
        speed / ranks as f64,
        100.0 * prediction.flops_utilisation(),
    )
}

/// Describes the parts of the step's time, on ranks of each color.
fn times(simulated: &Simulated<'_>) -> String {
    let ranks = &simulated.prediction.timing.ranks;
    let names = ranks.iter().take(MOST).map(name);
    let rows = Share::ALL.map(|share| {
        let of = |rank: &RankTiming| {
            let time = rank.shares.of(share);
            let part = 100.0 * time.seconds() / simulated.prediction.timing.step.seconds();
            format!("{time} ({part:.1} %)")
        };
        let times = ranks.iter().take(MOST).map(of);
        Vec::from_iter(iter::once(share.name().to_owned()).chain(times))
    });
    let table = table(iter::once("part of the step".to_owned()).chain(names), rows);
    match ranks.len().saturating_sub(MOST) {
        0 => table.to_string(),
        hidden => format!("{table}\nand {hidden} more kinds of ranks, which --json has"),
    }
}

/// Maximum number of colors of ranks in the table.
const MOST: usize = 4;

fn name(ranks: &RankTiming) -> String {
    match ranks.count {
        1 => format!("rank {}", ranks.first),
        count => format!("rank {} and {} like it", ranks.first, count - 1),
    }
}

/// Describes the use of links, on the ranks that use them most.
fn links(simulated: &Simulated<'_>) -> String {
    let prediction = &simulated.prediction;
    let colors = 0..prediction.timing.ranks.len();
    let parts = |level| colors.clone().map(move |color| prediction.link_utilisation(color, level));
    let part = |level| 100.0 * parts(level).fold(0.0, f64::max);
    let (inside, between) = (part(Level::Machine), part(Level::Network));
    match simulated.machine.device() {
        Some(_) => format!(
            "links are busy for at most {inside:.1} % of the step in a machine, {between:.1} % between machines"
        ),
        None => format!("collectives use memory for at most {inside:.1} % of the step"),
    }
}

fn memory(simulated: &Simulated<'_>) -> String {
    [on_rank(simulated), on_host(simulated)].join("")
}

fn on_rank(simulated: &Simulated<'_>) -> String {
    let memory = &simulated.prediction.memory;
    let parts = memory.parts().into_iter().filter(|(_, bytes)| bytes.get() > 0);
    let parts: Vec<String> = parts.map(|(name, bytes)| format!("{name} {bytes}")).collect();
    let mut text = format!("memory of a rank {}: {}", memory.total(), parts.join(", "));
    let capacity = memory_of(&simulated.machine, simulated.workload.plan.mesh().world_size());
    if memory.total() > capacity {
        text +=
            &format!("\nthat is more than the {capacity} that a rank has: the step does not fit");
    }
    text
}

/// Describes the host's memory, if parts are offloaded.
fn on_host(simulated: &Simulated<'_>) -> String {
    let each = simulated.prediction.memory.offloaded.total();
    let machine = &simulated.machine;
    let ranks = simulated.workload.plan.mesh().world_size();
    let Some(device) = machine.device().filter(|_| each.get() > 0) else { return String::new() };
    let text = format!("\nmemory of a rank in the host's: {each}");
    match machine.host_holds(each, ranks) {
        true => text,
        false => {
            let capacity = device.host.capacity.clone();
            format!(
                "{text}\nthat of all ranks of a host is more than its {capacity}: the step does not fit"
            )
        }
    }
}
