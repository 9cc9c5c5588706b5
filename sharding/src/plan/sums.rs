//! The sums of an update with factored state, and the bytes of their all-reduces.

use super::state::{rows_and_columns, trainable};
use super::{Flow, Plan};
use crate::{ByteCount, DType, ElemCount, State, balanced};

/// The values of the two all-reduces, in f64. Each has a value for each parameter; the first also has one for each row and each column.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sums {
    parameters: usize,
    rows_and_columns: usize,
}

impl Sums {
    pub(super) fn of(plan: &Plan) -> Self {
        let factored = trainable(plan).filter(|(_, param)| param.state == State::Factored);
        factored.fold(Self::default(), |sums, (_, param)| Self {
            parameters: sums.parameters + 1,
            rows_and_columns: sums.rows_and_columns + rows_and_columns(param),
        })
    }

    /// The memory of the sums, and of the factors after the update until it is certain.
    pub(super) fn extra(self) -> ByteCount {
        let sums = ElemCount::of(2 * self.parameters + self.rows_and_columns);
        sums.bytes(DType::F64) + self.staged()
    }

    /// The memory of the factors after the update.
    pub(super) fn staged(self) -> ByteCount {
        ElemCount::of(self.rows_and_columns).bytes(DType::F32)
    }

    /// The all-reduces of the rank at `shard_index`, one of `shards`.
    pub(super) fn flow(self, shard_index: usize, shards: usize) -> Flow {
        if self.parameters == 0 || shards == 1 {
            return Flow::NONE;
        }
        let values = [self.parameters + self.rows_and_columns, self.parameters];
        let received = values.map(|len| {
            let own = balanced(len, shards, shard_index).len();
            ElemCount::of(own) * (shards as u64 - 1) + ElemCount::of(len - own)
        });
        Flow { calls: 2, bytes: received.into_iter().sum::<ElemCount>().bytes(DType::F64) }
    }
}
