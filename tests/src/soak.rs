//! The soak: random steps of a tiny model on random meshes, with random faults. After each fault
//! the survivors hold the last committed step, bit for bit, and nothing is left behind.
//!
//! Everything follows from the seed, so every finding can be run again. In reading order: `draw` (a
//! random world), `training` (the steps of its ranks), `survivors` (the checks afterwards).

mod draw;
mod survivors;
mod training;

use std::collections::BTreeMap;
use std::fmt;

use hsdp_comm::Between;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

pub use self::draw::Trial;

/// The length of a soak, and its seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SoakOptions {
    /// Steps of training, over all worlds.
    pub steps: u64,
    /// The seed of all random choices.
    pub seed: u64,
    /// The way in which ranks exchange data. Ranks that exchange messages share no full copies.
    pub between: Between,
}

/// The counts of a soak.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Worlds that were made.
    pub worlds: u64,
    /// Steps that were committed by all survivors of their world.
    pub steps: u64,
    /// Steps that failed on all ranks and left no trace, the world going on.
    pub failed_steps: u64,
    /// Worlds that ended early.
    pub ended_worlds: u64,
    /// Worlds whose work went to worker threads, where those can be counted.
    pub worlds_with_workers: u64,
    /// How often each kind of fault was injected.
    pub faults: BTreeMap<String, u64>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} steps committed in {} worlds; {} steps failed and left no trace, {} worlds ended early; {} worlds had \
             workers, none is left",
            self.steps, self.worlds, self.failed_steps, self.ended_worlds, self.worlds_with_workers
        )?;
        for (kind, count) in &self.faults {
            writeln!(f, "{count:>6}  {kind}")?;
        }
        Ok(())
    }
}

/// Soaks, and calls `progress` after each world.
///
/// # Errors
/// A finding, with the seed of the world in which it was: [`Trial::of`] makes the same one again.
pub fn soak(options: SoakOptions, mut progress: impl FnMut(&Report)) -> Result<Report, String> {
    let mut random = ChaCha8Rng::seed_from_u64(options.seed);
    let mut report = Report::default();
    while report.steps < options.steps {
        let seed = random.random();
        let trial = Trial::of(seed, options.between);
        trial.run(&mut report).map_err(|found| format!("world {seed:#018x} ({trial}): {found}"))?;
        progress(&report);
    }
    Ok(report)
}
