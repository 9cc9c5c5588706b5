//! The state of the reports on parameters without a gradient.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::options::Unused;

/// The words and the state of the reports on parameters without a gradient.
#[derive(Debug, Default)]
pub(crate) struct UnusedReports {
    /// Usual causes, from the adapter of an autograd.
    causes: OnceLock<&'static str>,
    /// Whether the check of the first step is over, which it is on all ranks or on none.
    checked: AtomicBool,
    /// Whether the model was loaded after updates.
    trained: AtomicBool,
    /// Whether zeros have stood for missing gradients on this rank.
    has_cuts: AtomicBool,
}

impl UnusedReports {
    pub(crate) fn set_causes(&self, causes: &'static str) {
        self.causes.get_or_init(|| causes);
    }

    pub(crate) fn causes(&self) -> String {
        self.causes.get().map_or_else(String::new, |causes| format!("; {causes}"))
    }

    /// Notes a load of a checkpoint after this number of applied updates.
    pub(crate) fn note_load(&self, applied: u64) {
        self.trained.store(applied > 0, Ordering::Relaxed);
    }

    /// Returns whether the model was trained before it was loaded.
    pub(crate) fn is_trained(&self) -> bool {
        self.trained.load(Ordering::Relaxed)
    }

    pub(crate) fn note_cuts(&self) {
        self.has_cuts.store(true, Ordering::Relaxed);
    }

    pub(crate) fn seeks_cuts(&self, policy: Unused) -> bool {
        policy == Unused::ErrorOnAnyRank
            || !self.is_checked()
            || self.has_cuts.load(Ordering::Relaxed)
    }

    /// Returns whether the first step was checked.
    pub(crate) fn is_checked(&self) -> bool {
        self.checked.load(Ordering::Relaxed)
    }

    pub(crate) fn set_checked(&self) {
        self.checked.store(true, Ordering::Relaxed);
    }
}
