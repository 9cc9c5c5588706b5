//! The collectives of an update: the exchange by owners with its memory, and the all-reduces of
//! sums.

use std::collections::BTreeMap;
use std::ops::Range;

use super::state::{ByShard, FactoredSums, cut};
use super::{Flow, Owners, Plan, WholeMatrix, Wholes};
use crate::{ByteCount, DType, ElemCount, ParamId, State};

/// The collectives of one rank in an update, over the shard axis, for the parameters whose
/// [state](State) is `Muon`, `Owned` or `Factored`.
///
/// The parameters of `Muon` have one exchange, and those of `Owned` another one, by one optimizer
/// each. In an exchange every rank sends the parts of its shard to the owners ([`Owners`]) in one
/// all-to-all in f32, and gets what the owners computed in another one. Let
///
/// - `held` be the elements of the rank's shard that belong to these parameters,
/// - `owned` the elements of the matrices that it owns, and `both` those of them that its own shard
///   holds,
/// - `workspace` the f32 that the largest owned matrix needs: for `Muon`
///   [`WholeMatrix::workspace`], for `Owned` c for each element,
/// - `words` the f32 of state of the parameters that it owns; there is a copy of them until the
///   update is certain, with `Muon` 0,
/// - c = 1 for `Muon`, which sends one value of each element, and c = 2 for `Owned`, which sends
///   value and gradient.
///
/// | | `Muon` and `Owned` |
/// |---|---|
/// | calls | 2 |
/// | bytes from other ranks | 4 · (c · (owned - both) + held - both) |
/// | bytes of memory | 4 · (c · owned + words + max(c · held, workspace)) |
///
/// A model that is updated on a device has no parameters of `Owned`. With `numel` for the elements
/// of the largest matrix that the rank owns, and `square` for the largest square of a smaller dim,
/// the exchange through the host takes 4 · (owned + max(held, numel)) bytes there, and 4 · (held +
/// 2 · numel + 2 · square) bytes of the device. Iterations in bf16 take fewer, and in both dtypes,
/// for groups, more.
///
/// An exchange without parameters has none of these.
///
/// The parameters of `Factored` have two all-reduces of sums in f64, which one optimizer makes for
/// all of them. The first has n values: one for each parameter, and with two dims or more one for
/// each row and each column besides. The second has n values, one for each parameter. The plan is
/// that of a step in which each of them has a gradient: one without takes no part. With S ranks in
/// a shard group, and n_i for the length of the rank's slice of the [`balanced`](crate::balanced)
/// split of n over them, the rank receives 8 · ((S - 1) · n_i + n - n_i) bytes in each. Every rank
/// has memory for the values of both, and an f32 for each row and each column.
///
/// The results of an exchange wait until all exchanges of the update are over: 4 · (held + words)
/// bytes, and of `Factored` an f32 for each row and each column. With exchanges of several kinds,
/// `extra` is that of the kind with the most, and the results of the others: the memory is at most
/// so much, whatever their order.
///
/// Over a shard axis of one rank there are no calls and no bytes from others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct UpdatePlan {
    /// The all-to-alls of both exchanges, and the bytes that the rank receives from other ranks.
    pub exchanged: Flow,
    /// The all-reduces of sums, and the bytes that the rank receives from other ranks.
    pub summed: Flow,
    /// The memory beyond shards, gradients and state, at the peak of exchanges and sums.
    pub extra: ByteCount,
    /// The same for a model that is updated on a device: on the host, and on the device.
    pub extra_with_device: [ByteCount; 2],
}

impl UpdatePlan {
    /// The calls and bytes of all collectives of an update.
    ///
    /// # Panics
    /// If a count exceeds `u64::MAX`.
    #[must_use]
    pub fn flow(&self) -> Flow {
        self.exchanged + self.summed
    }
}

/// The collectives of an update, for all shard indices.
#[derive(Clone, Debug, Default)]
pub(super) struct UpdateFlows {
    muon: Option<UpdateExchange>,
    owned: Option<UpdateExchange>,
    sums: FactoredSums,
}

impl UpdateFlows {
    pub(super) fn of(plan: &Plan) -> Self {
        let is_muon = |id: ParamId| plan.spec()[id].state == State::Muon;
        let is_owned = |id: ParamId| matches!(plan.spec()[id].state, State::Owned(_));
        let muon = Owners::of(plan, Wholes::Matrices, is_muon).expect("the model was checked");
        let owned = Owners::of(plan, Wholes::Parameters, is_owned).expect("each is a whole");
        let muon = UpdateExchange::of(plan, &muon, 1, |matrix| matrix.workspace().get());
        let owned = UpdateExchange::of(plan, &owned, 2, |matrix| 2 * matrix.numel() as u64);
        let [muon, owned] = [muon, owned].map(|it| Some(it).filter(|it| it.owned.most() > 0));
        Self { muon, owned, sums: FactoredSums::of(plan) }
    }

    fn exchanges(&self) -> impl Iterator<Item = &UpdateExchange> {
        self.muon.iter().chain(&self.owned)
    }

    /// The collectives of the rank at `shard_index`, one of `shards`.
    pub(super) fn at(&self, shard_index: usize, shards: usize) -> UpdatePlan {
        let exchanged = match shards {
            1 => Flow::NONE,
            _ => self.exchanges().map(|exchange| exchange.flow(shard_index)).sum(),
        };
        let summed = self.sums.flow(shard_index, shards);
        let extra = self.extra(shard_index);
        let muon = self.muon.as_ref();
        let extra_with_device = muon.map(|exchange| exchange.extra_with_device(shard_index));
        let extra_with_device = extra_with_device.unwrap_or_default();
        UpdatePlan { exchanged, summed, extra, extra_with_device }
    }

    /// The memory of all exchanges and sums together: while one is under way, the results of the
    /// others may wait for their update.
    fn extra(&self, shard_index: usize) -> ByteCount {
        let exchanges = self.exchanges().map(|it| [it.extra(shard_index), it.staged(shard_index)]);
        let all: Vec<_> = exchanges.chain([[self.sums.extra(), self.sums.staged()]]).collect();
        let staged: ByteCount = all.iter().map(|[_, staged]| *staged).sum();
        let peaks = all.iter().map(|[extra, own]| ByteCount(staged.get() - own.get()) + *extra);
        peaks.max().unwrap_or_default()
    }

    /// The most memory of a rank of each kind, among all shard indices.
    pub(super) fn most(&self, of: fn(&UpdatePlan) -> ByteCount) -> ByteCount {
        let starts = self.exchanges().flat_map(|it| it.held.starts().chain(it.owned.starts()));
        starts.chain([0]).map(|shard_index| of(&self.at(shard_index, 1))).max().unwrap_or_default()
    }
}

/// One exchange, in elements.
#[derive(Clone, Debug)]
struct UpdateExchange {
    /// The f32 of each element that go to the owner.
    copies: u64,
    held: ByShard,
    owned: ByShard,
    both: ByShard,
    words: ByShard,
    workspace: ByShard,
    /// The elements of the largest matrix, and the largest square of a smaller dim.
    largest: ByShard,
    square: ByShard,
}

impl UpdateExchange {
    fn of(plan: &Plan, owners: &Owners, copies: u64, workspace: fn(&WholeMatrix) -> u64) -> Self {
        let held = owners.owned().flat_map(|(_, matrix)| pieces(plan, matrix));
        let owned = owners.owned().map(|(owner, it)| (owner..owner + 1, it.numel() as u64));
        let both = owners.owned().flat_map(|(owner, matrix)| {
            let own = pieces(plan, matrix).filter(move |(shards, _)| shards.contains(&owner));
            own.map(move |(_, len)| (owner..owner + 1, len))
        });
        let words = owners.owned().map(|(owner, matrix)| match plan.spec()[matrix.param].state {
            State::Owned(words) => (owner..owner + 1, words as u64),
            _ => (owner..owner + 1, 0),
        });
        Self {
            copies,
            held: ByShard::sums(held),
            owned: ByShard::sums(owned),
            both: ByShard::sums(both),
            words: ByShard::sums(words),
            workspace: most(owners, workspace),
            largest: most(owners, |matrix| matrix.numel() as u64),
            square: most(owners, |matrix| (matrix.rows.min(matrix.columns) as u64).pow(2)),
        }
    }

    fn flow(&self, shard_index: usize) -> Flow {
        let [held, owned, both] =
            [&self.held, &self.owned, &self.both].map(|it| it.at(shard_index));
        let elements = ElemCount(self.copies * (owned - both) + held - both);
        Flow { calls: 2, bytes: elements.bytes(DType::F32) }
    }

    fn extra(&self, shard_index: usize) -> ByteCount {
        let sent = self.copies * self.held.at(shard_index);
        let beside = sent.max(self.workspace.at(shard_index));
        let [owned, words] = [&self.owned, &self.words].map(|it| it.at(shard_index));
        let elements = ElemCount(self.copies * owned + words + beside);
        elements.bytes(DType::F32)
    }

    /// The results, from the end of the exchange to the update.
    fn staged(&self, shard_index: usize) -> ByteCount {
        let elements = self.held.at(shard_index) + self.words.at(shard_index);
        ElemCount(elements).bytes(DType::F32)
    }

    /// On the host, and on a device.
    fn extra_with_device(&self, shard_index: usize) -> [ByteCount; 2] {
        let all = [&self.held, &self.owned, &self.largest, &self.square];
        let [held, owned, largest, square] = all.map(|it| it.at(shard_index));
        let elements = [owned + held.max(largest), held + 2 * largest + 2 * square];
        elements.map(|elements| ElemCount(elements).bytes(DType::F32))
    }
}

/// The most of a matrix that each rank owns.
fn most(owners: &Owners, of: impl Fn(&WholeMatrix) -> u64) -> ByShard {
    let mut all = BTreeMap::<usize, u64>::new();
    for (owner, matrix) in owners.owned() {
        let most = all.entry(owner).or_default();
        *most = of(matrix).max(*most);
    }
    ByShard::sums(all.into_iter().map(|(owner, most)| (owner..owner + 1, most)))
}

/// The pieces of a matrix, as [`cut`] returns them.
fn pieces(plan: &Plan, matrix: &WholeMatrix) -> impl Iterator<Item = (Range<usize>, u64)> + use<> {
    let layout = plan.layout(matrix.param.unit);
    let start = layout.params()[matrix.param.index].start + matrix.start;
    let pieces = cut(start..start + matrix.numel(), layout.trainable().shard_len);
    pieces.map(|(shards, len)| (shards, len as u64))
}
