//! The operations of a rank in a step, in words.

use std::sync::Arc;

use hsdp_sharding::Plan;
use hsdp_sharding::step::{DryRun, Output, Rules, Sequences, UnitOrder};

use super::{Device, Options};

/// Microbatches that differ: the first, those in the middle, and the last.
const DIFFERENT: u64 = 3;

const LEGEND: &str = "\
g1 gathers unit 1 for the forward, g1' for the backward; u1 hands it to the program, d1 drops it; \
l1 accumulates its gradients; r1 reduce-scatters them; a1 all-reduces their sums; f1 adds these to \
the partial; (g1) waits for the gather; <headers> exchanges records";

/// Returns the first step of a model whose program uses the units as they are declared.
pub(super) fn text(plan: &Plan, options: &Options) -> String {
    let rules = Rules {
        sequences: match options.device {
            Device::Cpu => Sequences::OfEachChannel,
            Device::Cuda => Sequences::One,
        },
        order: UnitOrder::Error,
        ..Rules::default()
    };
    let count = options.choices.microbatches;
    let written = usize::try_from(count.min(DIFFERENT)).expect("at most three");
    let step = DryRun::of(&Arc::new(plan.clone()), rules, Some(written), written);
    let mut lines = vec![line("opening", &step.opening)];
    for (index, outputs) in step.microbatches.iter().enumerate() {
        let part = match index as u64 {
            0 if count > 1 => "microbatch 0".to_owned(),
            1 if count > DIFFERENT => format!("microbatches 1 to {}", count - 2),
            _ => format!("microbatch {}", count - 1 - (written - 1 - index) as u64),
        };
        lines.push(line(&part, outputs));
    }
    lines.push(line("finish", &step.finish));
    let units = plan.spec().units().iter().enumerate();
    let units: Vec<String> = units.map(|(index, unit)| format!("{index} {}", unit.name)).collect();
    format!("{}\n\nunits: {}\n{LEGEND}", lines.join("\n"), units.join(", "))
}

fn line(part: &str, outputs: &[Output]) -> String {
    let words: Vec<String> = outputs.iter().map(ToString::to_string).collect();
    format!("{part}: {}", words.join(" "))
}
