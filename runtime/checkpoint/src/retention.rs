//! The generations that a store keeps: CHECKPOINT.md, "Retention".

use crate::error::Error;
use crate::lease::Lease;

impl Lease {
    /// Removes generations that are older than those to be kept (W10). The newest one is that of
    /// `newest`, which has just been written. Returns the failures.
    pub(crate) fn remove_old(&self, newest: u64) -> Vec<Error> {
        let steps = match self.store().steps() {
            Ok(steps) => steps,
            Err(error) => return vec![error],
        };
        let (mut readable, mut left_undone) = (1, Vec::new());
        for step in steps.into_iter().rev().filter(|step| *step < newest) {
            match self.store().open(step) {
                Err(Error::Version { .. }) => {}
                // A person has removed it.
                Err(error) if error.is_absence() => {}
                Err(error) if !error.is_loss() => left_undone.push(error),
                _ if readable == self.store().kept() => {
                    left_undone.extend(self.store().delete(step).err());
                }
                Ok(_) if !self.has_noted(step) => readable += 1,
                _ => {}
            }
        }
        left_undone
    }
}
