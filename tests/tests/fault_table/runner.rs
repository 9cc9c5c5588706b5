//! How a row runs: under a deadline, with its panics kept, and with what happened noted for the
//! table at the end.

use std::any::Any;
use std::cell::RefCell;
use std::fmt::Display;
use std::io::{self, Write as _};
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread::{self, Builder};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;

use crate::page;
use crate::rows::NEED_SIGNALS;

/// When a row has failed whatever it does. None takes a tenth of it, but for the one that stops a
/// process.
const DEADLINE: Duration = Duration::from_secs(20);

/// How long it may take from a fault until the last rank has been told.
pub(crate) const LIMIT: Duration = Duration::from_secs(1);

/// A row of the table.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) number: u32,
    /// What goes wrong.
    pub(crate) fault: &'static str,
    /// What must be the case then: the rest of the trial's name.
    pub(crate) claim: &'static str,
    /// Commits the fault and checks what follows.
    pub(crate) run: fn() -> Happened,
}

impl Row {
    /// `row_07_a_second_claimant_...`
    pub(crate) fn name(&self) -> String {
        format!("row_{:02}_{}", self.number, self.claim)
    }
}

/// What came of a fault.
#[derive(Clone, Debug)]
pub(crate) struct Happened {
    /// What ranks were told, in one line.
    pub(crate) told: String,
    /// How long after the fault the last of them was; or how long it all took, where there is
    /// nothing to be told.
    pub(crate) took: Duration,
}

impl Happened {
    /// That `told` was told to all so long after the fault.
    ///
    /// # Panics
    /// If that was too late.
    pub(crate) fn in_time(told: &impl Display, took: Duration) -> Self {
        assert!(took < LIMIT, "it took {took:?} until the last rank was told: {told}");
        Self::after(told, took)
    }

    /// That `told` was told, where time is no matter.
    pub(crate) fn after(told: &impl Display, took: Duration) -> Self {
        Self { told: in_one_line(&told.to_string()), took }
    }
}

fn in_one_line(text: &str) -> String {
    text.lines().map(str::trim).collect::<Vec<_>>().join("; ").replace(":; ", ": ")
}

/// Rows that have run, with what happened or why they failed.
static RESULTS: Mutex<Vec<(&'static Row, Result<Happened, String>)>> = Mutex::new(Vec::new());

thread_local! {
    /// The last panic of this thread, with its place.
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Panics are the business of rows: a rank's is a fault or is reported by whoever joins it, a row's
/// is its failure.
pub(crate) fn keep_panics_quiet() {
    panic::set_hook(Box::new(|info| PANIC.set(info.to_string())));
}

/// The trial of a row; ignored, where its fault cannot be committed.
pub(crate) fn trial(row: &'static Row) -> Trial {
    let impossible = cfg!(not(unix)) && NEED_SIGNALS.contains(&row.number);
    let trial = Trial::test(row.name(), move || {
        let result = under_deadline(row).and_then(|happened| page::says_so(row, happened));
        let failure = result.as_ref().err().cloned();
        RESULTS.lock().unwrap_or_else(PoisonError::into_inner).push((row, result));
        failure.map_or(Ok(()), |failure| Err(failure.into()))
    });
    trial.with_ignored_flag(impossible)
}

/// Runs a row in a thread that is left behind if it does not end.
fn under_deadline(row: &'static Row) -> Result<Happened, String> {
    let (says, hears) = mpsc::channel();
    let run = move || {
        let happened = catch_unwind(AssertUnwindSafe(row.run));
        let _ = says.send(happened.map_err(|_: Box<dyn Any + Send>| PANIC.take()));
    };
    let thread = Builder::new().name(row.name()).spawn(run);
    drop(thread.map_err(|error| error.to_string())?);
    hears.recv_timeout(DEADLINE).unwrap_or_else(|_| {
        Err(format!("{} has not ended within its deadline of {DEADLINE:?}", row.name()))
    })
}

/// Prints the rows that have run, in their order.
pub(crate) fn print_table() {
    let mut results = RESULTS.lock().unwrap_or_else(PoisonError::into_inner);
    results.sort_by_key(|(row, _)| row.number);
    let width = results.iter().map(|(row, _)| row.fault.chars().count()).max().unwrap_or(0);
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "row  result      time  {:width$}  what ranks were told", "fault");
    for (Row { number, fault, .. }, result) in results.iter() {
        let (word, told, took) = match result {
            Ok(Happened { told, took }) => ("ok", told.as_str(), format!("{took:.1?}")),
            Err(failure) => ("FAILED", failure.lines().next().unwrap_or(""), String::new()),
        };
        let _ = writeln!(out, "{number:>3}  {word:<6}  {took:>8}  {fault:width$}  {told}");
    }
}

/// Waits by the clock, where that is what a row is about.
#[expect(clippy::disallowed_methods, reason = "a process that stops is stopped for a time")]
pub(crate) fn pause(time: Duration) {
    thread::sleep(time);
}

/// Waits until something is the case; `false` if it is not within a few seconds.
pub(crate) fn becomes(true_at_last: impl Fn() -> bool) -> bool {
    let started = Instant::now();
    while started.elapsed() < 5 * LIMIT {
        if true_at_last() {
            return true;
        }
        pause(Duration::from_millis(1));
    }
    false
}
