//! The effects of due faults on a call. `lie` has descriptors that say something else than was meant, and `poisoned` a
//! gradient that is not finite.

mod lie;
mod poisoned;

use std::sync::Arc;
use std::time::Duration;

use hsdp_kernels::GradientValues;

use crate::Error;
use crate::call::Call;
use crate::fault::{Fault, FaultKind};
use crate::handle::RankHandle;
use crate::site::Site;

/// A call after the faults that are due at it.
pub(crate) struct Injected {
    /// The call as the others are told of it.
    pub(crate) call: Call,
    /// The description of the elements that the call moves, where `call` says something else.
    pub(crate) actual: Option<Call>,
    pub(crate) how: HowIssued,
}

/// Whether and how a call is issued.
pub(crate) enum HowIssued {
    /// As it is.
    Issued,
    /// A barrier is issued before it.
    AfterBarrier,
    /// It meets no other member.
    Skipped,
}

impl RankHandle {
    /// Has the rank commit the faults that are due at a call, which has no number yet.
    pub(crate) fn inject(
        &self,
        site: &Site,
        call: Call,
        gradients: &mut [Option<Arc<dyn GradientValues>>],
    ) -> Result<Injected, Error> {
        let mut injected = Injected { call, actual: None, how: HowIssued::Issued };
        if self.faults.is_empty() {
            return Ok(injected);
        }
        let call = &injected.call;
        if self.faults.has_left() {
            return Err(self.injected(call, "it left its world, by an injected fault"));
        }
        self.check(call.op)?;
        let step = (self.own.record.step(), self.own.record.epoch());
        let due = self.faults.due(step, &call.tag, gradients);
        for Fault { kind, .. } in due {
            self.commit(kind, site, &mut injected, gradients)?;
        }
        Ok(injected)
    }

    /// Commits one fault.
    fn commit(
        &self,
        kind: FaultKind,
        site: &Site,
        injected: &mut Injected,
        gradients: &mut [Option<Arc<dyn GradientValues>>],
    ) -> Result<(), Error> {
        let Injected { call, actual, how } = injected;
        match kind {
            FaultKind::Panic => panic!("{}", self.injected(call, "an injected panic")),
            FaultKind::Error => return Err(self.injected(call, "an injected error")),
            FaultKind::OutOfMemory => return Err(self.lacks_memory(call)),
            FaultKind::Leave => {
                self.faults.leave();
                self.leave();
                return Err(self.injected(call, "it leaves its world, by an injected fault"));
            }
            FaultKind::Delay(delay) => drop(self.own.status().sleep(delay, || false)),
            FaultKind::Freeze => return Err(self.freeze(call)),
            FaultKind::NonFinite(value) => poisoned::poison(gradients, value),
            _ if site.ranks.len() == 1 => {
                let what = format!("an injected fault ({kind}) that a group of one cannot detect");
                return Err(self.injected(call, &what));
            }
            FaultKind::SkippedCall => *how = HowIssued::Skipped,
            FaultKind::SwappedOrder => site.sequence.swap_next(self.own.record.epoch()),
            FaultKind::ExtraCall => *how = HowIssued::AfterBarrier,
            FaultKind::WrongOp
            | FaultKind::WrongReduction
            | FaultKind::WrongDType
            | FaultKind::WrongCount
            | FaultKind::WrongRoot => {
                actual.get_or_insert_with(|| call.clone());
                lie::tell(kind, call, self.own.rank, &site.ranks);
            }
        }
        Ok(())
    }

    fn lacks_memory(&self, call: &Call) -> Error {
        let what = format!("its elements, in {} (an injected fault)", call.tag);
        self.out_of_memory(call.op, call.bytes(), what)
    }

    /// Sleeps until the world ends, or no rank is left to end it.
    fn freeze(&self, call: &Call) -> Error {
        let end =
            self.own.status().sleep(Duration::MAX, || self.own.core.state.is_last(self.own.rank));
        let what = "frozen by an injected fault, until all others had left";
        end.unwrap_or_else(|| self.injected(call, what))
    }

    fn injected(&self, call: &Call, what: &str) -> Error {
        let what = format!("{what}, in {}", call.tag);
        Error::Injected { op: call.op, rank: self.own.rank, step: self.own.record.step(), what }
    }
}
