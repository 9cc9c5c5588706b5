//! The effects of due faults on a call, with descriptors that say something else than was meant,
//! and gradients that are not finite.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use half::{bf16, f16};
use hsdp_kernels::{GradientValues, Values};
use hsdp_sharding::{DType, Rank};

use crate::call::GroupCall;
use crate::fault::{Fault, FaultKind};
use crate::handle::RankHandle;
use crate::site::Site;
use crate::{CallError, Counts, Error, Op, Reduction};

/// A call after the faults that are due at it.
pub(crate) struct Injected {
    /// The call as the others are told of it.
    pub(crate) call: GroupCall,
    /// The description of the elements that the call moves, where `call` says something else.
    pub(crate) actual: Option<GroupCall>,
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
        call: GroupCall,
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
        let step = self.own.record.step();
        let epoch = self.own.record.epoch();
        let due = self.faults.due(step, epoch, &call.tag, gradients);
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
            FaultKind::Delay(delay) => drop(self.own.early_ends().sleep(delay, || false)),
            FaultKind::Freeze => return Err(self.freeze(call)),
            FaultKind::NonFinite(value) => poison(gradients, value),
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
                lie(kind, call, self.own.rank, &site.ranks);
            }
        }
        Ok(())
    }

    fn lacks_memory(&self, call: &GroupCall) -> Error {
        let what = format!("its elements, in {} (an injected fault)", call.tag);
        self.out_of_memory(call.op, call.bytes(), what)
    }

    /// Sleeps until the world ends, or no rank is left to end it.
    fn freeze(&self, call: &GroupCall) -> Error {
        let end = self
            .own
            .early_ends()
            .sleep(Duration::MAX, || self.own.core.state.is_last(self.own.rank));
        let what = "frozen by an injected fault, until all others had left";
        end.unwrap_or_else(|| self.injected(call, what))
    }

    fn injected(&self, call: &GroupCall, what: &str) -> Error {
        let what = format!("{what}, in {}", call.tag);
        CallError::Injected { op: call.op, rank: self.own.rank, step: self.own.record.step(), what }
            .into()
    }
}

/// Has `rank`, one of `ranks`, say something else than it meant.
fn lie(kind: FaultKind, call: &mut GroupCall, rank: Rank, ranks: &[Rank]) {
    match kind {
        FaultKind::WrongOp if call.op == Op::AllGather => call.op = Op::AllReduce,
        FaultKind::WrongOp => call.op = Op::AllGather,
        FaultKind::WrongReduction => {
            let next = call.reduction.map_or(0, |it| it as usize + 1);
            call.reduction = Some(Reduction::ALL[next % Reduction::ALL.len()]);
        }
        FaultKind::WrongDType if call.dtype == Some(DType::F32) => call.dtype = Some(DType::F64),
        FaultKind::WrongDType => call.dtype = Some(DType::F32),
        FaultKind::WrongCount => {
            // Whether splits fit together is known when all are there: a single count never agrees
            // with them.
            call.counts = Counts::Each(call.counts.total().wrapping_add(1));
            call.dtype = call.dtype.or(Some(DType::F32));
        }
        FaultKind::WrongRoot => {
            let slot = call.root.and_then(|root| ranks.iter().position(|rank| *rank == root));
            call.root = Some(slot.map_or(rank, |slot| ranks[(slot + 1) % ranks.len()]));
        }
        _ => unreachable!("{kind} is no lie"),
    }
}

/// A gradient whose element 0 reads as `value`, rounded to its dtype. The gradient itself is not
/// written.
#[derive(Debug)]
struct Poisoned {
    gradient: Arc<dyn GradientValues>,
    value: f32,
}

/// Poisons the first of the gradients that has an element, if one has.
fn poison(gradients: &mut [Option<Arc<dyn GradientValues>>], value: f32) {
    if let Some(gradient) = gradients.iter_mut().flatten().find(|gradient| !gradient.is_empty()) {
        *gradient = Arc::new(Poisoned { gradient: Arc::clone(gradient), value });
    }
}

impl GradientValues for Poisoned {
    fn len(&self) -> usize {
        self.gradient.len()
    }

    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        if !range.contains(&0) {
            return self.gradient.read(range, visit);
        }
        self.gradient.read(range, &mut |values| match values {
            Values::F32(values) => visit(Values::F32(&begun_with(self.value, values))),
            Values::F16(values) => {
                visit(Values::F16(&begun_with(f16::from_f32(self.value), values)))
            }
            Values::BF16(values) => {
                visit(Values::BF16(&begun_with(bf16::from_f32(self.value), values)));
            }
        });
    }
}

/// `values`, of which there is at least one, with another first one.
fn begun_with<T: Copy>(first: T, values: &[T]) -> Vec<T> {
    let mut values = values.to_vec();
    values[0] = first;
    values
}
