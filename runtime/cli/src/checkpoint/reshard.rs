//! `hsdp checkpoint reshard`.

use std::error::Error;
use std::path::PathBuf;

use clap::Args;
use hsdp_checkpoint::{Generation, Head, Manifest, Slice, Writer};
use hsdp_train::print;
use hsdp_train::stderr::in_one_line;

use super::{Which, store};
use crate::outcome::Outcome;

/// Options of `hsdp checkpoint reshard`.
#[derive(Args, Debug)]
pub(crate) struct Options {
    #[command(flatten)]
    which: Which,

    /// Directory of checkpoints in which to write the copy
    #[arg(value_name = "OUT")]
    out: PathBuf,

    /// Number of files of the copy
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..))]
    files: u16,
}

/// Writes the copy, one file after the other. The content of one file at a time is in memory.
pub(crate) fn run(options: &Options) -> Result<Outcome, Box<dyn Error>> {
    options.which.read(|generation| copy(generation, options))
}

fn copy(generation: &Generation, options: &Options) -> Result<Outcome, Box<dyn Error>> {
    let manifest = generation.manifest();
    let count = usize::from(options.files);
    let mut lease = store(&options.out).lease("hsdp checkpoint reshard")?;
    let draft = lease.begin(manifest.step)?;
    for index in 0..count {
        if let Err(error) = write(generation, draft.place(), Writer { index, of: count }) {
            draft.discard();
            return Err(error);
        }
    }
    let committed = draft.commit(head(manifest), count)?;
    let path = in_one_line(committed.path.display());
    print(format_args!("step {}: {count} files, in {path}", manifest.step))?;
    Ok(Outcome::Well)
}

/// Writes this writer's part of each tensor.
fn write(
    generation: &Generation,
    place: &hsdp_checkpoint::DraftPlace,
    writer: Writer,
) -> Result<(), Box<dyn Error>> {
    let mut parts = Vec::new();
    for (name, tensor) in &generation.manifest().tensors {
        let numel = tensor.numel().ok_or("a tensor's number of elements does not fit 64 bits")?;
        let [index, of] = [writer.index, writer.of].map(|it| it as u64);
        // The first files have one more element if the elements cannot be divided evenly.
        let cut = |index: u64| numel / of * index + index.min(numel % of);
        let (begin, end) = (cut(index), cut(index + 1));
        if begin < end {
            let mut values = vec![0.0; usize::try_from(end - begin)?];
            generation.read(name, begin, &mut values)?;
            parts.push((name, &tensor.shape, begin, values));
        }
    }
    let slices = parts.iter().map(|(tensor, shape, offset, values)| Slice {
        tensor,
        shape,
        offset: *offset,
        values: values[..].into(),
    });
    Ok(place.write(writer, &slices.collect::<Vec<_>>())?)
}

fn head(manifest: &Manifest) -> Head {
    let Manifest { step, mesh, training, optimizer, user, frozen_digest, settings, .. } =
        manifest.clone();
    Head { step, mesh, training, optimizer, user, frozen_digest, settings }
}
