//! Descriptors that say something else than was meant, always so that it is seen.

use hsdp_sharding::{DType, Rank};

use crate::call::Call;
use crate::fault::FaultKind;
use crate::{Counts, Op, Reduction};

/// Has `rank`, one of `ranks`, say something else than it meant.
pub(super) fn tell(kind: FaultKind, call: &mut Call, rank: Rank, ranks: &[Rank]) {
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
            // Whether splits fit together is known when all are there: a single count never agrees with them.
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
