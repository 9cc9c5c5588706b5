//! A rank's saves, and copies of as many bytes.

use std::path::Path;
use std::time::{Duration, Instant};

use hsdp::checkpoint::{CheckpointOptions, Checkpoints};
use hsdp::{AdamW, AdamWOptions, ByteCount, Error, ModelOptions, World, WorldOptions};
use hsdp_benches::steps::Steps;
use hsdp_comm::{Channel, Group, Stage, Tag};
use hsdp_kernels::copy_past_caches;
use serde_json::Value;

use crate::options::Options;

/// What one save took, on the rank that took longest.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Round {
    /// Until training goes on.
    pub(crate) stall: Duration,
    /// To copy as many bytes, and nothing else.
    pub(crate) copy: Duration,
    /// A look at whether it is over, while it is not.
    pub(crate) poll: Duration,
    /// Until it is on the disk.
    pub(crate) saved: Duration,
}

impl Round {
    fn longest(self, other: Self) -> Self {
        Self {
            stall: self.stall.max(other.stall),
            copy: self.copy.max(other.copy),
            poll: self.poll.max(other.poll),
            saved: self.saved.max(other.saved),
        }
    }
}

/// What was measured.
#[derive(Debug)]
pub(crate) struct Measured {
    /// That all ranks copy together.
    pub(crate) bytes: ByteCount,
    /// The first on fresh memory.
    pub(crate) rounds: Vec<Round>,
}

pub(crate) fn measure(options: &Options, folder: &Path) -> Result<Measured, Error> {
    let rank = |world| rank(world, options, folder);
    let ranks = hsdp::launch(options.mesh.world_size(), WorldOptions::default(), rank);
    let mut all = Measured { bytes: ByteCount(0), rounds: Vec::new() };
    for (bytes, rounds) in ranks.into_iter().collect::<Result<Vec<_>, Error>>()? {
        all.bytes += bytes;
        all.rounds.resize_with(rounds.len(), Round::default);
        let longest = all.rounds.iter().zip(rounds).map(|(one, other)| one.longest(other));
        all.rounds = longest.collect();
    }
    Ok(all)
}

/// Measures the bytes that a rank copies, and its times.
fn rank(world: World, options: &Options, folder: &Path) -> Result<(ByteCount, Vec<Round>), Error> {
    let Options { mesh, repeat, .. } = *options;
    let together = world.world_group(Channel::User);
    let mut steps = Steps::new(world, options.size(), ModelOptions::on(mesh))?;
    let mut adamw = AdamW::new(steps.model(), AdamWOptions::default());
    let with = CheckpointOptions::default();
    let mut checkpoints = Checkpoints::open(steps.model(), folder, with)?;
    let bytes = steps.model().plan().snapshot(steps.model().rank());
    let mut plain = Plain::new(bytes);
    let mut rounds = Vec::new();
    for _ in 0..=repeat {
        // So that all that is saved was written, as it is in training.
        steps.train(&mut adamw)?;
        let model = steps.model();
        let mut round = Round::default();
        meet(&together)?;
        let begun = Instant::now();
        // It comes back when all ranks have copied.
        checkpoints.save_in_background(model, &adamw, &Value::Null)?;
        round.stall = begun.elapsed();
        let before = Instant::now();
        let ended = checkpoints.poll(model)?;
        round.poll = before.elapsed();
        if ended.is_none() {
            checkpoints.finish(model)?;
        }
        round.saved = begun.elapsed();
        meet(&together)?;
        let before = Instant::now();
        plain.copy();
        meet(&together)?;
        round.copy = before.elapsed();
        rounds.push(round);
    }
    Ok((bytes, rounds))
}

fn meet(together: &Group) -> Result<(), Error> {
    Ok(together.barrier(Tag::new(Stage::User))?.wait()?)
}

/// Memory as large as what is saved, and where it is copied to.
struct Plain {
    from: Vec<f32>,
    to: Vec<f32>,
}

impl Plain {
    /// Memory that was never written would be read, and copied, faster than it can be.
    fn new(bytes: ByteCount) -> Self {
        let len = usize::try_from(bytes.0).expect("it fits into memory") / size_of::<f32>();
        Self { from: vec![1.0; len], to: Vec::new() }
    }

    /// As fast as it can be done: past the caches. The first time to memory that is found while it
    /// is copied to.
    fn copy(&mut self) {
        if self.to.is_empty() {
            self.to = vec![0.0; self.from.len()];
        }
        copy_past_caches(&mut self.to, &self.from);
    }
}
