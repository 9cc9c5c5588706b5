//! Trainable parameters that got no gradient in a step.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use hsdp_sharding::Role;

use crate::agreement::Agreement;
use crate::engine::fabric::Fabric;
use crate::error::Error;
use crate::options::Unused;

/// The words and the state of the reports on parameters without a gradient.
#[derive(Debug, Default)]
pub(crate) struct UnusedReports {
    /// The usual causes, by the adapter of an autograd.
    causes: OnceLock<&'static str>,
    /// Whether a first step was checked.
    checked: AtomicBool,
}

impl UnusedReports {
    pub(crate) fn set_causes(&self, causes: &'static str) {
        self.causes.get_or_init(|| causes);
    }

    fn causes(&self) -> String {
        self.causes.get().map_or_else(String::new, |causes| format!("; {causes}"))
    }

    fn is_first(&self) -> bool {
        !self.checked.swap(true, Ordering::Relaxed)
    }
}

/// Refuses a step with parameters without a gradient, if the options say so. All ranks come to the same end.
///
/// # Errors
/// [`Error::UnusedParameters`].
pub(super) fn check(fabric: &Fabric, step: u64, agreement: &Agreement) -> Result<(), Error> {
    if fabric.options.unused != Unused::Error {
        return Ok(());
    }
    let objective = fabric.options.objective;
    let without = |number| (fabric.name_of(number), agreement.ranks_without(number, objective));
    let unused = trainable(fabric).map(without).filter(|(_, ranks)| !ranks.is_empty());
    let parameters: Vec<_> = unused.collect();
    if parameters.is_empty() {
        return Ok(());
    }
    Err(Error::UnusedParameters { step, parameters, causes: fabric.unused.causes() })
}

/// Warns, on one rank and after the first step that is applied, of the parameters that got no gradient on any rank.
pub(super) fn warn_once(fabric: &Fabric, step: u64, agreement: &Agreement) {
    let warns = fabric.options.unused == Unused::Warn && fabric.rank().index() == 0;
    if !warns || !fabric.unused.is_first() {
        return;
    }
    let unused = trainable(fabric).filter(|number| !agreement.present_anywhere().contains(*number));
    let names: Vec<String> = unused.map(|number| fabric.name_of(number)).collect();
    if !names.is_empty() {
        let (count, causes) = (names.len(), fabric.unused.causes());
        hsdp_warnings::warn!(
            step,
            "{count} trainable parameters got no gradient on any rank, and are not updated: {}{causes}",
            names.join(", ")
        );
    }
}

/// The numbers of the trainable parameters.
fn trainable(fabric: &Fabric) -> impl Iterator<Item = usize> {
    (0..fabric.parameters()).filter(|number| {
        let id = fabric.parameter(*number);
        fabric.plan.spec()[id].role == Role::Trainable
    })
}
