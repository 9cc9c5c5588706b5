//! The properties that hold after a world has ended, for any cause.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use hsdp::memory::{self, Category};
use hsdp::{ByteCount, Rank};
use hsdp_comm::{Fault, FaultKind};

use super::Report;
use super::draw::Trial;
use super::training::{Ended, same_bits};

impl Trial {
    /// Runs the world, and the same without faults for as many steps as the survivors committed,
    /// and compares.
    pub(super) fn run(&self, report: &mut Report) -> Result<(), String> {
        let threads = threads();
        let ended = self.train(u64::MAX, self.faults.clone());
        let survivors = self.survivors(ended)?;
        let committed = agreed(&survivors)?;
        let twins = self.train(committed, Vec::new());
        for (rank, survivor) in &survivors {
            let twin = twins[*rank].as_ref().map_err(|error| format!("without faults: {error}"))?;
            if !survivor.shards.is_empty() && !same_bits(&survivor.shards, &twin.shards) {
                let twin = twin.fatal.as_deref().unwrap_or("its twin has made all steps");
                return Err(format!(
                    "rank {rank} does not hold what step {committed} committed; without faults: {twin}"
                ));
            }
        }
        self.count(report, &survivors, committed);
        drop((survivors, twins));
        nothing_is_left(self.options.mesh.world_size(), threads)
    }

    /// The ranks that committed no fault that ends themselves, and no half of an update.
    fn survivors(&self, ended: Vec<Result<Ended, String>>) -> Result<Vec<(usize, Ended)>, String> {
        let mut survivors = Vec::new();
        for (rank, ended) in ended.into_iter().enumerate() {
            match ended {
                Ok(ended) if ended.is_half_updated => {}
                Ok(ended)
                    if ends_its_rank(&ended.armed, rank) == ends_its_rank(&self.faults, rank) =>
                {
                    survivors.push((rank, ended));
                }
                Err(panic) if !panic.contains("an injected panic") => {
                    return Err(format!("rank {rank} panicked: {panic}"));
                }
                // It has committed such a fault.
                _ => {}
            }
        }
        Ok(survivors)
    }

    fn count(&self, report: &mut Report, survivors: &[(usize, Ended)], committed: u64) {
        report.worlds += 1;
        report.steps += committed;
        if let Some((_, first)) = survivors.first() {
            report.failed_steps += first.failed_steps;
            report.ended_worlds += u64::from(first.fatal.is_some());
            report.worlds_with_workers += u64::from(first.workers > 0);
        }
        for fault in &self.faults {
            let kind = match fault.kind {
                FaultKind::Delay(_) => "delay".to_owned(),
                FaultKind::NonFinite(_) => "non-finite gradient".to_owned(),
                kind => kind.to_string(),
            };
            *report.faults.entry(kind).or_default() += 1;
        }
    }
}

/// How many of the faults are such that `rank` is not to be asked for its state after one: it is
/// gone, or it believes that it has met others though it has not.
fn ends_its_rank(faults: &[Fault], rank: usize) -> usize {
    let of_rank = faults.iter().filter(|fault| fault.rank.index() == rank);
    let ends = |fault: &&Fault| {
        matches!(fault.kind, FaultKind::Panic | FaultKind::Leave | FaultKind::SkippedCall)
    };
    of_rank.filter(ends).count()
}

/// The number of steps that all survivors committed.
fn agreed(survivors: &[(usize, Ended)]) -> Result<u64, String> {
    let mut committed = survivors.iter().map(|(_, ended)| ended.committed);
    let first = committed.next().unwrap_or(0);
    if committed.all(|other| other == first) {
        return Ok(first);
    }
    let all: Vec<_> = survivors.iter().map(|(rank, ended)| (rank, ended.committed)).collect();
    Err(format!("survivors committed different numbers of steps: {all:?}"))
}

/// No thread of the worlds runs any more, and no buffer of theirs is held.
fn nothing_is_left(ranks: usize, threads_before: Option<usize>) -> Result<(), String> {
    // A thread that was joined has done its last, but the system may still list it for a moment.
    let started = Instant::now();
    while let (Some(before), Some(after)) = (threads_before, threads())
        && after > before
    {
        if started.elapsed() > Duration::from_secs(1) {
            let workers = workers();
            return Err(format!("{after} threads run ({workers} workers), there were {before}"));
        }
        thread::yield_now();
    }
    if memory::usage(Rank::new(0), Category::Shard).peak == ByteCount(0) {
        return Err(
            "no memory was ever counted: this program has no `CountingAllocator`".to_owned()
        );
    }
    for rank in (0..ranks).map(Rank::new) {
        for category in Category::COUNTED {
            let live = memory::usage(rank, category).live;
            if live != ByteCount(0) {
                return Err(format!("{live} of rank {rank} are left in {category}"));
            }
        }
    }
    Ok(())
}

/// How many threads this process has, where the system says so.
fn threads() -> Option<usize> {
    Some(fs::read_dir("/proc/self/task").ok()?.count())
}

/// How many of them are workers of worlds; 0 where the system does not say so.
pub(super) fn workers() -> usize {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.starts_with("hsdp-worker")).count()
}
