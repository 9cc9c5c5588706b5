//! Descriptors that say something else than was meant, always so that it is seen.

use hsdp_sharding::{DType, Rank};

use crate::call::Call;
use crate::fault::FaultKind;
use crate::{Counts, Op, Reduction};

/// Has `rank`, one of `ranks`, say something else than it meant.
pub(super) fn tell(kind: FaultKind, call: &mut Call, rank: Rank, ranks: &[Rank]) {
    match kind {
        FaultKind::WrongOp => call.op = other_op(call.op),
        FaultKind::WrongReduction => call.reduction = Some(other_reduction(call.reduction)),
        FaultKind::WrongDType => call.dtype = Some(other_dtype(call.dtype)),
        FaultKind::WrongCount => {
            // Whether splits fit together is known when all are there: a single count never agrees with them.
            call.counts = Counts::Each(call.counts.total().wrapping_add(1));
            call.dtype = call.dtype.or(Some(DType::F32));
        }
        FaultKind::WrongRoot => call.root = Some(other_root(call.root, rank, ranks)),
        _ => {}
    }
}

fn other_op(op: Op) -> Op {
    if op == Op::AllGather { Op::AllReduce } else { Op::AllGather }
}

fn other_reduction(reduction: Option<Reduction>) -> Reduction {
    let next = reduction.map_or(0, |it| it as usize + 1);
    Reduction::ALL[next % Reduction::ALL.len()]
}

fn other_dtype(dtype: Option<DType>) -> DType {
    if dtype == Some(DType::F32) { DType::F64 } else { DType::F32 }
}

/// The member after the root; this rank, where there is none.
fn other_root(root: Option<Rank>, rank: Rank, ranks: &[Rank]) -> Rank {
    let place = root.and_then(|root| ranks.iter().position(|rank| *rank == root));
    place.map_or(rank, |place| ranks[(place + 1) % ranks.len()])
}
