//! Mode `Every` with replicas: the reduce-scattered sums of a microbatch are all-reduced when it ends.

use std::mem;

use crate::error::Error;
use crate::state::context::Context;
use crate::state::sums::Scattered;
use crate::step::partial::{Partial, Settled};
use crate::step::place::Place;
use crate::step::reductions::{Reductions, issue_all_reduce};

impl Reductions {
    /// All-reduces the reduce-scattered sums of the microbatch, and adds them to the partials.
    ///
    /// This happens only where a microbatch ends and all of its gathers are done: an earlier wait for a reduction could
    /// be a wait for a rank that waits for one of this rank's gathers.
    pub(super) fn settle_transients(
        &mut self,
        context: &Context,
        place: Place,
    ) -> Result<(), Error> {
        // The next microbatch reuses these lists; after an error there is none.
        let (mut scattering, mut reducing) =
            (mem::take(&mut self.scattering), mem::take(&mut self.reducing));
        for (unit, pending) in scattering.drain(..) {
            let Scattered { sums: partial, non_finite } = pending.wait()?;
            if let Some(non_finite) = non_finite {
                self.note(context, unit, (place.microbatch, non_finite));
            }
            reducing.push((unit, issue_all_reduce(context, place, (unit, partial))?));
        }
        for (unit, pending) in reducing.drain(..) {
            let reduced = pending.wait()?;
            let Settled { partial, fold, .. } = self.settle(context, unit)?;
            let mut accumulator = partial.sized(context, reduced.len(), (place.step, unit))?;
            accumulator.fold_in(context, (&reduced, fold), place.step)?;
            self.partials[unit.index()] = Partial::Held(accumulator);
            self.transients[unit.index()] = reduced;
        }
        (self.scattering, self.reducing) = (scattering, reducing);
        Ok(())
    }
}
