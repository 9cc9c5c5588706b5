//! Operations of all ranks outside their steps, and the exchange of their results.

use std::cmp::Reverse;
use std::sync::mpsc;
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use hsdp_comm::{Part, PartKind, Stage, Tag};
use hsdp_kernels::memory;
use hsdp_sharding::Rank;

use crate::agree::comparison;
use crate::error::Error;
use crate::options::digest;
use crate::persist::problem::{Problem, ProblemKind};
use crate::state::context::{Context, ErrorSite};

/// Number of times within a deadline that a rank tells the others that it is still at work. A rank
/// that has ended says so at once.
const SIGNS_OF_LIFE: u32 = 4;

/// The content that a rank has found under a path of its own.
#[derive(Clone, Debug)]
pub(super) struct OpenedLines {
    pub(super) path: String,
    /// The content in words, without the path.
    pub(super) lines: Vec<String>,
}

/// The first difference between what two ranks have opened: the first rank that differs, and one
/// with which it was compared.
#[derive(Clone, Debug)]
pub(super) struct FolderDifference {
    pub(super) ranks: [Rank; 2],
    pub(super) paths: [String; 2],
    pub(super) lines: [String; 2],
}

impl From<FolderDifference> for Undone {
    fn from(FolderDifference { ranks, paths, lines }: FolderDifference) -> Self {
        let [rank, other] = ranks;
        let [here, there] = paths;
        let [got, want] = lines;
        let what = format!(
            "{here} has {got}, and on rank {other} {there} has {want}: all ranks must read the same"
        );
        Self::Failed(Failed { rank, problem: Problem::lasting(what) })
    }
}

impl From<FolderDifference> for Error {
    fn from(FolderDifference { ranks, paths, lines }: FolderDifference) -> Self {
        let [rank, other] = ranks;
        let [got, want] = [0, 1].map(|it| format!("{} in {}", lines[it], paths[it]));
        Self::Disagreement { what: "the content of a folder".into(), rank, got, other, want }
    }
}

/// The ranks that say that they are at work.
fn at_work(said: &[u64]) -> Vec<usize> {
    said.iter().enumerate().filter(|(_, is_alive)| **is_alive != 0).map(|(rank, _)| rank).collect()
}

/// Returns the rank whose problem all ranks report, and the code of its kind: the first lasting
/// one, or else the first removal, or else the first damage. Another generation would not help
/// where one rank says so.
fn worst(said: &[u64]) -> Option<(usize, u64)> {
    let failed = said.iter().copied().enumerate().filter(|(_, code)| *code != 0);
    failed.max_by_key(|(rank, code)| (*code, Reverse(*rank)))
}

/// An operation of all ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct JointOperation<'a> {
    context: &'a Context,
    operation: &'static str,
    step: u64,
    /// Number of the checkpoints that it is about, if they have one.
    checkpoints: Option<u32>,
}

/// The rank whose problem all ranks report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failed {
    pub(super) rank: Rank,
    pub(super) problem: Problem,
}

/// The reason why an operation was not done.
#[derive(Debug)]
pub(super) enum Undone {
    /// A rank has failed at it. All ranks have the same problem.
    Failed(Failed),
    /// The communication has failed, or the call does not fit.
    Fatal(Error),
}

impl From<Failed> for Undone {
    fn from(failed: Failed) -> Self {
        Self::Failed(failed)
    }
}

impl From<Error> for Undone {
    fn from(error: Error) -> Self {
        Self::Fatal(error)
    }
}

impl<'a> JointOperation<'a> {
    pub(super) fn new(context: &'a Context, operation: &'static str, step: u64) -> Self {
        Self { context, operation, step, checkpoints: None }
    }

    /// Returns this operation, for the errors that name it.
    pub(super) fn site(&self) -> ErrorSite<'a> {
        self.context.site(self.operation, self.step)
    }

    /// Returns the operation as one about the checkpoints with this number. Its exchanges do not
    /// meet those about others.
    pub(super) fn about(self, checkpoints: u32) -> Self {
        Self { checkpoints: Some(checkpoints), ..self }
    }

    fn tag(&self) -> Tag {
        let tag = self.context.tag(None, Stage::Export, self.step, 0);
        let part = |number| Part { kind: PartKind::Checkpoints, number };
        self.checkpoints.map_or(tag, |number| tag.part(part(number)))
    }

    /// Runs a part on each rank. If one fails, all ranks get its error. Collective over the world.
    ///
    /// # Errors
    /// [`Error::Checkpoint`], the same on all ranks; [`Error::Comm`].
    pub(super) fn run<T: Send>(
        &self,
        part: impl FnOnce() -> Result<T, Problem> + Send,
    ) -> Result<T, Error> {
        self.attempt(part).map_err(|undone| self.error(undone))
    }

    /// Runs a part as [`run`](Self::run) does, but tells the failure of a rank from other errors.
    ///
    /// A part may take any time: it runs on a thread of its own, while this thread tells the other
    /// ranks that it is alive.
    pub(super) fn attempt<T: Send>(
        &self,
        part: impl FnOnce() -> Result<T, Problem> + Send,
    ) -> Result<T, Undone> {
        let rank = self.context.rank();
        thread::scope(|scope| {
            let (ends, ended) = mpsc::channel::<()>();
            let run = move || {
                memory::set_rank(rank);
                let result = part();
                drop(ends);
                result
            };
            let name = format!("hsdp-checkpoint-{rank}");
            let part = thread::Builder::new().name(name).spawn_scoped(scope, run);
            // The channel carries no message: it closes when the part ends. If no thread could be
            // started, it is closed already, and `agree` notifies the other ranks of the failure.
            self.wait(|within| ended.recv_timeout(within) != Err(mpsc::RecvTimeoutError::Timeout))?;
            self.agree(match part.map(ScopedJoinHandle::join) {
                Ok(Ok(result)) => result,
                Ok(Err(panic)) => Err(Problem::panicked(&*panic)),
                Err(error) => Err(Problem::no_thread(&error)),
            })
        })
    }

    /// Waits until all ranks' parts have ended: `has_ended` says whether this rank's part has ended
    /// within a duration. Collective over the world.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub(super) fn wait(&self, mut has_ended: impl FnMut(Duration) -> bool) -> Result<(), Error> {
        let deadline = self.context.world.deadline();
        let sign_of_life = (deadline / SIGNS_OF_LIFE).min(Duration::from_secs(1));
        let begun = Instant::now();
        let mut warnings = 0;
        loop {
            let is_alive = !has_ended(sign_of_life);
            let at_work = self.at_work(is_alive)?;
            if at_work.is_empty() {
                return Ok(());
            }
            // Files may take any time: a long wait is a warning, and no error.
            if is_alive && begun.elapsed() > deadline * (warnings + 1) {
                warnings += 1;
                let Self { operation, step, .. } = self;
                hsdp_warnings::warn!(
                    operation,
                    step,
                    ?at_work,
                    "ranks have been at work for longer than a deadline"
                );
            }
        }
    }

    /// The ranks whose part has not ended yet. Collective over the world.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub(super) fn at_work(&self, is_alive: bool) -> Result<Vec<usize>, Error> {
        self.context.control.exchange(self.tag(), [u64::from(is_alive)], at_work)
    }

    /// Exchanges how all ranks' parts have ended. Collective over the world.
    pub(super) fn agree<T>(&self, mine: Result<T, Problem>) -> Result<T, Undone> {
        let control = &self.context.control;
        let code = mine.as_ref().err().map_or(0, |problem| problem.kind.code());
        let worst = control.exchange(self.tag(), [code], worst)?;
        let Some((rank, code)) = worst else {
            return Ok(
                mine.unwrap_or_else(|_| unreachable!("this rank has said that it succeeded"))
            );
        };
        let rank = Rank::new(rank);
        let what = mine.err().map_or_else(String::new, |problem| problem.what);
        let what = control.text_of(self.tag(), rank, &what)?;
        Err(Undone::Failed(Failed {
            rank,
            problem: Problem { kind: ProblemKind::of_code(code), what },
        }))
    }

    /// Compares what ranks have opened, each for itself: their folders may hold different versions.
    /// If two differ, all ranks get the first difference. Collective over the world.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub(super) fn compare(
        &self,
        opened: &OpenedLines,
    ) -> Result<Result<(), FolderDifference>, Error> {
        let said = self.tell([digest::of_lines(&opened.lines)])?.concat();
        let Some(places) = comparison::odd_one(&said) else { return Ok(Ok(())) };
        let ranks = places.map(Rank::new);
        let lines = comparison::first_difference(self.context, ranks, &opened.lines)?;
        let digests = || places.map(|place| format!("the digest {:#018x}", said[place]));
        let text_of = |rank| self.context.control.text_of(self.tag(), rank, &opened.path);
        let paths = [text_of(ranks[0])?, text_of(ranks[1])?];
        Ok(Err(FolderDifference { ranks, paths, lines: lines.unwrap_or_else(digests) }))
    }

    /// Exchanges `WORDS` words with all ranks. Returns them in rank order. Collective over the
    /// world.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub(super) fn tell<const WORDS: usize>(
        &self,
        mine: [u64; WORDS],
    ) -> Result<Vec<[u64; WORDS]>, Error> {
        let words = |said: &[u64]| said.as_chunks::<WORDS>().0.to_vec();
        self.context.control.exchange(self.tag(), mine, words)
    }

    /// Checks that all ranks have `said` the same word, in rank order. `text` describes the first
    /// difference, given the word of the rank that differs, another word, and the rank that has it.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] of the rank that differs, the same on all ranks.
    pub(super) fn check_same(
        &self,
        said: &[u64],
        text: impl FnOnce(u64, u64, Rank) -> String,
    ) -> Result<(), Error> {
        let Some([rank, other]) = comparison::odd_one(said) else { return Ok(()) };
        let problem = Problem::lasting(text(said[rank], said[other], Rank::new(other)));
        Err(self.error(Failed { rank: Rank::new(rank), problem }))
    }

    /// Exchanges a word with all ranks, and checks that all have the same one, as
    /// [`check_same`](Self::check_same) does. Collective over the world.
    ///
    /// # Errors
    /// [`Error::Checkpoint`], the same on all ranks; [`Error::Comm`].
    pub(super) fn compare_word(
        &self,
        mine: u64,
        text: impl FnOnce(u64, u64, Rank) -> String,
    ) -> Result<(), Error> {
        self.check_same(&self.tell([mine])?.concat(), text)
    }

    /// Returns a list of numbers that rank 0 has. Collective over the world.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub(super) fn list_of_first(&self, mine: &[u64]) -> Result<Vec<u64>, Error> {
        let mine = mine.iter().map(u64::to_string).collect::<Vec<_>>().join(" ");
        let list = self.context.control.text_of(self.tag(), Rank::new(0), &mine)?;
        Ok(list.split_whitespace().filter_map(|number| number.parse().ok()).collect())
    }

    /// Whether this is rank 0, which logs the results that all ranks have alike.
    pub(super) fn is_first(&self) -> bool {
        self.context.rank().index() == 0
    }

    /// The error that all ranks get.
    pub(super) fn error(&self, undone: impl Into<Undone>) -> Error {
        let Self { operation, step, .. } = *self;
        match undone.into() {
            Undone::Failed(Failed { rank, problem }) => {
                Error::Checkpoint { operation, step, rank, problem: problem.what }
            }
            Undone::Fatal(error) => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ProblemKind, worst};

    #[test]
    fn the_worst_kind_of_problem_is_reported_and_the_first_of_it() {
        let codes = [ProblemKind::Damage, ProblemKind::Removed, ProblemKind::Lasting]
            .map(ProblemKind::code);
        assert!(codes.is_sorted() && codes.map(|code| ProblemKind::of_code(code).code()) == codes);
        assert_eq!(worst(&[0, 0]), None);
        assert_eq!(worst(&[0, 1, 1]), Some((1, 1)));
        assert_eq!(worst(&[1, 2, 2]), Some((1, 2)));
        assert_eq!(worst(&[3, 2, 1]), Some((0, 3)));
    }
}
