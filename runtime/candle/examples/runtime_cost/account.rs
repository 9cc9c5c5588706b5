//! Where the time of a step goes: what the spans of its rank threads add up to.
//!
//! A span is charged what it lasts, without the spans of this list inside it. Time is that of a clock
//! on the wall, so a thread that waits for a core is charged too, wherever it waits.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::span::Id;
use tracing::{Span, Subscriber, info_span};
use tracing_subscriber::layer::{Context, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, Registry};

/// A step that is counted; everything else happens in it.
const STEP: &str = "step";

/// The spans that are told apart, and what happens in them.
const PARTS: [(&str, &str); 11] = [
    ("forward", "the model's forward"),
    ("backward", "the model's backward"),
    ("begin", "the step's header"),
    ("gather", "issued, and waited for"),
    ("reduce", "reduce-scatters, issued"),
    ("finish", "reductions waited for, all-reduce, agreement"),
    ("copy", "copies of parameters and gradients"),
    ("exchange", "adding up all threads' gradients"),
    ("meet", "waiting for the other threads"),
    ("optimizer", "AdamW"),
    (STEP, "the rest"),
];

/// The span of a step; none for the first, which is not counted.
pub(crate) fn counted(step: usize) -> Span {
    if step > 0 { info_span!("step") } else { Span::none() }
}

/// Adds up spans. One for the whole program, from its opening on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Account(Arc<Mutex<BTreeMap<&'static str, Duration>>>);

thread_local! {
    /// The spans that this thread is in: since when, and how long others were open inside.
    static OPEN: RefCell<Vec<(&'static str, Instant, Duration)>> = const { RefCell::new(Vec::new()) };
}

impl Account {
    /// From now on all threads are charged.
    pub(crate) fn open() -> Result<Self, Box<dyn Error>> {
        let account = Self::default();
        tracing::subscriber::set_global_default(Registry::default().with(account.clone()))?;
        Ok(account)
    }

    /// What there is, a line a part, as means of so many `steps` of all ranks together; begins anew.
    pub(crate) fn take(&self, steps: usize) -> String {
        let charged = std::mem::take(&mut *self.0.lock());
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
            *self.0.lock().entry(name).or_default() += lasted.saturating_sub(inside);
            if let Some((_, _, inside)) = open.last_mut() {
                *inside += lasted;
            }
        });
    }
}
