//! The parts of a step's time: the sums of the spans of its rank threads.
//!
//! A span is charged its duration, without that of the listed spans inside it. Durations are of
//! wall time, so they include the time that a thread waits for a core.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hsdp_train::{Switch, Warnings};
use parking_lot::Mutex;
use tracing::span::Id;
use tracing::subscriber::SetGlobalDefaultError;
use tracing::{Span, Subscriber, info_span};
use tracing_subscriber::layer::{Context, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, Registry};

/// The span of a step that is counted. All other spans are inside it.
const STEP: &str = "step";

/// The listed spans, each with a description.
const PARTS: [(&str, &str); 11] = [
    ("forward", "the model's forward"),
    ("backward", "the model's backward"),
    ("begin", "the step's header"),
    ("gather", "issuing gathers and waiting for them"),
    ("reduce", "issuing reduce-scatters"),
    ("finish", "waiting for reductions, all-reduce, agreement"),
    ("copy", "copies of parameters and gradients"),
    ("exchange", "adding up all threads' gradients"),
    ("meet", "waiting for the other threads"),
    ("optimizer", "AdamW"),
    (STEP, "the rest"),
];

/// Returns the span of a step; none for the first, which is not counted.
pub(super) fn counted(step: u64) -> Span {
    if step > 0 { info_span!("step") } else { Span::none() }
}

/// The sums of spans. There is one for the whole program.
#[derive(Clone, Debug, Default)]
pub(super) struct Account {
    charged: Arc<Mutex<BTreeMap<&'static str, Duration>>>,
    switch: Switch,
}

thread_local! {
    /// The spans that this thread is in: the name, the start, and the time of listed spans inside.
    static OPEN: RefCell<Vec<(&'static str, Instant, Duration)>> =
        const { RefCell::new(Vec::new()) };
}

impl Account {
    /// Makes the subscriber of the process: warnings are shown from now on, and spans are charged
    /// from [`open`](Self::open) on.
    pub(super) fn listen(warnings: &Warnings) -> Result<Self, SetGlobalDefaultError> {
        let account = Self::default();
        let charged = Registry::default().with(account.clone().with_filter(account.switch.clone()));
        tracing::subscriber::set_global_default(charged.with(warnings.layer()))?;
        Ok(account)
    }

    /// Starts to charge the spans of all threads.
    pub(super) fn open(&self) {
        self.switch.turn_on();
    }

    /// Charges no span that begins from now on.
    pub(super) fn close(&self) {
        self.switch.turn_off();
    }

    /// Returns the sums, a line for each part, as means of `steps` steps of all ranks together.
    /// Then all sums are 0.
    pub(super) fn take(&self, steps: usize) -> String {
        let charged = std::mem::take(&mut *self.charged.lock());
        let total: Duration = charged.values().sum();
        let mut lines = String::new();
        for (name, what) in PARTS {
            let Some(time) = charged.get(name) else { continue };
            let share = 100.0 * time.as_secs_f64() / total.as_secs_f64();
            let time = time.as_secs_f64() * 1e3 / steps as f64;
            let _ = writeln!(lines, "  {time:8.2} ms {share:5.1} %  {name}: {what}");
        }
        lines
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Account {
    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        let Some(name) = context.span(id).map(|span| span.name()) else { return };
        OPEN.with_borrow_mut(|open| {
            let in_a_step = name == STEP || !open.is_empty();
            if in_a_step && PARTS.iter().any(|(part, _)| *part == name) {
                open.push((name, Instant::now(), Duration::ZERO));
            }
        });
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        let Some(name) = context.span(id).map(|span| span.name()) else { return };
        OPEN.with_borrow_mut(|open| {
            let Some((_, since, inside)) = open.pop_if(|open| open.0 == name) else { return };
            let lasted = since.elapsed();
            *self.charged.lock().entry(name).or_default() += lasted.saturating_sub(inside);
            if let Some((_, _, inside)) = open.last_mut() {
                *inside += lasted;
            }
        });
    }
}
