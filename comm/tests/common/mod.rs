//! Ranks as threads. Their results, errors among them, do not end their world.

#![allow(dead_code, reason = "every test crate uses its own part of this")]

use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard};

use hsdp_comm::{RankFailure, World, WorldOptions, launch};
use tracing::field::Field;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Runs `size` ranks, and returns their results in rank order, or the panic of a rank.
pub(crate) fn outcomes<T: Send>(
    size: usize,
    options: WorldOptions,
    rank: impl Fn(World) -> T + Sync,
) -> Vec<Result<T, RankFailure>> {
    launch(size, options, |world| Ok(rank(world)))
}

/// Runs `size` ranks with the default options, and returns their results in rank order. Panics if a
/// rank does.
pub(crate) fn results<T: Send>(size: usize, rank: impl Fn(World) -> T + Sync) -> Vec<T> {
    let outcomes = outcomes(size, WorldOptions::default(), rank);
    outcomes.into_iter().map(|outcome| outcome.expect("no rank panics")).collect()
}

/// The lines at level INFO or WARN that have a field of this name, of the threads whose default it is.
/// On a busy machine there may be others.
#[derive(Clone)]
pub(crate) struct Said {
    field: &'static str,
    lines: Arc<Mutex<Vec<(Level, String)>>>,
}

impl Said {
    pub(crate) fn of(field: &'static str) -> Self {
        let said = Self { field, lines: Arc::default() };
        // Without one for the whole process, a place that another thread reaches while this one is made
        // can miss it.
        let elsewhere = Self { field, lines: Arc::default() };
        let _ = tracing::subscriber::set_global_default(elsewhere);
        said
    }

    pub(crate) fn lines(&self) -> MutexGuard<'_, Vec<(Level, String)>> {
        self.lines.lock().expect("not poisoned")
    }
}

impl Subscriber for Said {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= Level::INFO
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = String::new();
        event.record(&mut |field: &Field, value: &dyn Debug| {
            fields.push_str(&format!("{field}={value:?} "));
        });
        if fields.contains(&format!("{}=", self.field)) {
            self.lines().push((*event.metadata().level(), fields));
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
