//! `hsdp checkpoint diff`.

use std::collections::BTreeSet;
use std::error::Error;
use std::path::PathBuf;

use clap::Args;
use hsdp_checkpoint::Generation;
use hsdp_train::print;

use super::open;
use crate::CommandOutcome;

/// Number of elements that are compared at a time.
const BLOCK: usize = 1 << 20;

/// Options of `hsdp checkpoint diff`.
#[derive(Args, Debug)]
pub(crate) struct DiffArgs {
    /// Directory of the first checkpoint
    #[arg(value_name = "DIR")]
    first: PathBuf,

    /// Directory of the second checkpoint
    #[arg(value_name = "OTHER")]
    second: PathBuf,

    /// Step of the first checkpoint; without it, the newest intact one
    #[arg(long, value_name = "STEP")]
    step: Option<u64>,

    /// Step of the second checkpoint; without it, the newest intact one
    #[arg(long, value_name = "STEP")]
    other_step: Option<u64>,
}

/// Prints a line for each difference.
pub(crate) fn run(options: &DiffArgs) -> Result<CommandOutcome, Box<dyn Error>> {
    let first = open(&options.first, options.step)?;
    let second = open(&options.second, options.other_step)?;
    let mut lines = of_heads(&first, &second);
    let [one, other] = [&first, &second].map(|it| &it.manifest().tensors);
    let names: BTreeSet<&String> = one.keys().chain(other.keys()).collect();
    for name in names {
        let shown = name.escape_debug();
        lines.extend(match (one.get(name), other.get(name)) {
            (Some(_), None) => Some(format!("{shown}: only in the first")),
            (None, _) => Some(format!("{shown}: only in the second")),
            (Some(a), Some(b)) if (&a.shape, a.dtype) != (&b.shape, b.dtype) => Some(format!(
                "{shown}: {} {:?} in the first, {} {:?} in the second",
                a.dtype, a.shape, b.dtype, b.shape
            )),
            (Some(a), Some(_)) => of_tensors(name, a.numel().unwrap_or(0), [&first, &second])?,
        });
    }
    if lines.is_empty() {
        print("the checkpoints are the same, bit by bit")?;
        return Ok(CommandOutcome::Well);
    }
    print(lines.join("\n"))?;
    Ok(CommandOutcome::Wrong)
}

/// Lists the differences outside of tensors.
fn of_heads(first: &Generation, second: &Generation) -> Vec<String> {
    let [a, b] = [first.manifest(), second.manifest()];
    let mut lines = Vec::new();
    let mut compare = |what: &str, differs: bool, values: [String; 2]| {
        if differs {
            let [a, b] = values;
            lines.push(format!("{what}: {a} in the first, {b} in the second"));
        }
    };
    compare("step", a.step != b.step, [a.step, b.step].map(|step| step.to_string()));
    compare("user", a.user != b.user, [&a.user, &b.user].map(ToString::to_string));
    let training = [a.training, b.training].map(|training| format!("{training:?}"));
    compare("training", a.training != b.training, training);
    let optimizer = [&a.optimizer, &b.optimizer].map(|it| format!("{it:?}"));
    let frozen = [a.frozen_digest, b.frozen_digest].map(|digest| match digest {
        Some(digest) => format!("left out, of digest {digest:#018x}"),
        None => "with the others".to_owned(),
    });
    compare("frozen parameters", a.frozen_digest != b.frozen_digest, frozen);
    let settings = [&a.settings, &b.settings].map(|settings| format!("{settings:?}"));
    compare("settings", a.settings != b.settings, settings);
    let buffers = [&a.buffers, &b.buffers].map(|buffers| format!("{buffers:?}"));
    compare("buffers", a.buffers != b.buffers, buffers);
    compare("optimizer", a.optimizer != b.optimizer, optimizer);
    lines
}

/// Returns the number of elements that differ in a tensor, how many of them are NaN on a side, and
/// the largest difference of the others.
fn of_tensors(
    name: &str,
    numel: u64,
    generations: [&Generation; 2],
) -> Result<Option<String>, Box<dyn Error>> {
    let mut differ = 0_u64;
    let mut nan = 0_u64;
    let mut most = 0.0_f32;
    for start in (0..numel).step_by(BLOCK) {
        let len = usize::try_from((numel - start).min(BLOCK as u64))?;
        let read = |generation: &Generation| {
            let mut values = vec![0.0_f32; len];
            generation.read(name, start, &mut values).map(|()| values)
        };
        let [a, b] = generations.map(read);
        for (a, b) in a?.into_iter().zip(b?).filter(|(a, b)| a.to_bits() != b.to_bits()) {
            differ += 1;
            match a.is_nan() || b.is_nan() {
                true => nan += 1,
                false => most = most.max((a - b).abs()),
            }
        }
    }
    let mut line = format!("{}: {differ} of {numel} elements differ", name.escape_debug());
    if nan > 0 {
        line += &format!(", {nan} of them NaN on one side or both");
    }
    if differ > nan {
        line += &format!(", by at most {most:e}");
    }
    Ok((differ > 0).then_some(line))
}
