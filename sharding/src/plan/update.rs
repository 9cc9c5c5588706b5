//! The elements that ranks update, and the collectives of an update: the exchange by owners with
//! its memory, and the all-reduces of sums.

use std::collections::BTreeMap;
use std::ops::Range;

use super::state::{self, FactoredSums};
use super::updaters::{ByUpdater, alike};
use super::{Flow, Owners, Plan, WholeMatrix, Wholes};
use crate::{ByteCount, DType, ElemCount, ParamId, Rank, State, UnitId};

/// The collectives of one rank in an update, for the parameters whose [state](State) is `Muon`,
/// `Owned` or `Factored`.
///
/// The parameters of `Muon` have one exchange, and those of `Owned` another one, by one optimizer
/// each. An exchange goes over the [updaters](Plan::updaters): the ranks of a shard group, or all
/// ranks if replicas [divide](Plan::divides_state) state. Each of them sends the parts that it
/// [updates](Plan::updated) to the owners ([`Owners`]) in one all-to-all in f32, and receives the
/// results of the owners in another one. Let
///
/// - `held` be the elements of these parameters that the rank updates,
/// - `owned` the elements of the matrices that it owns, and `both` those that it owns and updates,
/// - `workspace` the f32 that an owner needs at once, at most: for `Muon`
///   [`WholeMatrix::workspace`] for each matrix of a bundle, for `Owned` c for each element of the
///   largest parameter,
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
/// A bundle has the matrices of one shape that the rank owns, and at most
/// [`WholeMatrix::at_once`] of them. Matrices for which the options of a group have other iterations
/// are not in one bundle, so groups may take less than `workspace`.
///
/// A model that is updated on a device has no parameters of `Owned`. With `numel` for the elements
/// of the largest bundle of the rank, and `square` for the most elements that the squares of the
/// smaller dim of a bundle have, the exchange through the host takes 4 · (owned + max(held, numel))
/// bytes there, and 4 · (held + 2 · numel + 2 · square) bytes of the device. Iterations in bf16 take
/// fewer, and in both dtypes, for groups, more.
///
/// An exchange without parameters has none of these. With one updater there are no calls and no
/// bytes from others.
///
/// The parameters of `Factored` have two all-reduces of sums in f64 over all W ranks, which one
/// optimizer makes for all of them. Each rank adds up the elements of its [slice](Plan::slice),
/// whether replicas divide state or not. The first all-reduce has n values: one for each parameter,
/// and with two dims or more one for each row and each column besides. The second has n values, one
/// for each parameter. The plan is that of a step in which each of them has a gradient: one without
/// takes no part. With n_i for the length of the rank's part of the [`balanced`](crate::balanced)
/// split of n over all ranks, the rank receives 8 · ((W - 1) · n_i + n - n_i) bytes in each. In a
/// world of one rank there are no calls. Every rank has memory for the values of both, and an f32
/// for each row and each column.
///
/// The results of an exchange wait until all exchanges of the update are over: 4 · (held + words)
/// bytes, and of `Factored` an f32 for each row and each column. With exchanges of several kinds,
/// `extra` is that of the kind with the most, and the results of the others: the memory is at most
/// so much, whatever their order.
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

/// The elements that all ranks update, their state, and their collectives.
#[derive(Clone, Debug)]
pub(super) struct Updates {
    /// The elements that each rank updates.
    elements: ByUpdater,
    /// The elements among them that are in units that compute in 16 bits.
    rounded: ByUpdater,
    /// The bytes of optimizer state.
    state: ByUpdater,
    muon: Option<UpdateExchange>,
    owned: Option<UpdateExchange>,
    sums: FactoredSums,
}

impl Updates {
    pub(super) fn of(plan: &Plan) -> Self {
        let of_run = |(unit, run): (UnitId, Range<usize>)| {
            let rank = Rank::new(run.start);
            let elements = plan.updated(unit, rank).len() as u64;
            let is_rounded = plan.compute_dtype(unit) != DType::F32;
            let rounded = if is_rounded { elements } else { 0 };
            (run, [elements, rounded, state::of_unit(plan, unit, rank)])
        };
        let of_parameters = state::of_parameters(plan).map(|(run, bytes)| (run, [0, 0, bytes]));
        let amounts = runs(plan).map(of_run).chain(of_parameters);
        let [elements, rounded, state] = ByUpdater::sums(amounts);
        let is_muon = |id: ParamId| plan.spec()[id].state == State::Muon;
        let is_owned = |id: ParamId| matches!(plan.spec()[id].state, State::Owned(_));
        let newton_schulz = |matrix: &WholeMatrix, count| count * matrix.workspace().get();
        let value_and_gradient = |matrix: &WholeMatrix, _| 2 * matrix.numel() as u64;
        let muon = UpdateExchange::of(plan, Wholes::Matrices, is_muon, 1, newton_schulz);
        let owned = UpdateExchange::of(plan, Wholes::Parameters, is_owned, 2, value_and_gradient);
        Self { elements, rounded, state, muon, owned, sums: FactoredSums::of(plan) }
    }

    /// Returns the bytes of optimizer state of an updater.
    pub(super) fn state(&self, updater: usize) -> ByteCount {
        ByteCount(self.state.at(updater))
    }

    /// Returns the most bytes of optimizer state that an updater has.
    pub(super) fn most_state(&self) -> ByteCount {
        ByteCount(self.state.most())
    }

    /// Returns the number of elements that an updater updates in all units.
    pub(super) fn elements(&self, updater: usize) -> ElemCount {
        ElemCount(self.elements.at(updater))
    }

    /// Returns the number of those that are in units that compute in 16 bits.
    pub(super) fn rounded(&self, updater: usize) -> ElemCount {
        ElemCount(self.rounded.at(updater))
    }

    /// Returns the largest of both numbers.
    pub(super) fn most_elements(&self) -> [ElemCount; 2] {
        [&self.elements, &self.rounded].map(|numbers| ElemCount(numbers.most()))
    }

    fn exchanges(&self) -> impl Iterator<Item = &UpdateExchange> {
        self.muon.iter().chain(&self.owned)
    }

    /// Returns the collectives of a rank.
    pub(super) fn of_rank(&self, plan: &Plan, rank: Rank) -> UpdatePlan {
        let updater = plan.updater(rank);
        let exchanged = match plan.updaters() {
            1 => Flow::NONE,
            _ => self.exchanges().map(|exchange| exchange.flow(updater)).sum(),
        };
        let summed = self.sums.flow(plan, rank);
        let extra = self.extra(updater);
        UpdatePlan { exchanged, summed, extra, extra_with_device: self.extra_with_device(updater) }
    }

    /// Returns the memory of all exchanges and sums together: while one is under way, the results
    /// of the others may wait for their update.
    pub(super) fn extra(&self, updater: usize) -> ByteCount {
        let exchanges = self.exchanges().map(|it| [it.extra(updater), it.staged(updater)]);
        let all: Vec<_> = exchanges.chain([[self.sums.extra(), self.sums.staged()]]).collect();
        let staged: ByteCount = all.iter().map(|[_, staged]| *staged).sum();
        let peaks = all.iter().map(|[extra, own]| ByteCount(staged.get() - own.get()) + *extra);
        peaks.max().unwrap_or_default()
    }

    /// Returns the memory of an update on a device: on the host, and on the device.
    pub(super) fn extra_with_device(&self, updater: usize) -> [ByteCount; 2] {
        let muon = self.muon.as_ref();
        muon.map(|exchange| exchange.extra_with_device(updater)).unwrap_or_default()
    }

    /// Returns the most memory of a kind that an updater has.
    pub(super) fn most(&self, of: impl Fn(&Self, usize) -> ByteCount) -> ByteCount {
        let starts = self.exchanges().flat_map(|it| it.held.starts().chain(it.owned.starts()));
        starts.chain([0]).map(|updater| of(self, updater)).max().unwrap_or_default()
    }
}

/// One exchange, in elements.
#[derive(Clone, Debug)]
struct UpdateExchange {
    /// The f32 of each element that go to the owner.
    copies: u64,
    held: ByUpdater,
    owned: ByUpdater,
    both: ByUpdater,
    words: ByUpdater,
    workspace: ByUpdater,
    /// The most elements of a bundle, and of the squares of its smaller dim.
    largest: ByUpdater,
    square: ByUpdater,
}

impl UpdateExchange {
    /// Returns the exchange of the selected parameters; `None` if there are none.
    ///
    /// # Panics
    /// If a selected parameter does not have such wholes.
    fn of(
        plan: &Plan,
        wholes: Wholes,
        select: impl Fn(ParamId) -> bool,
        copies: u64,
        workspace: fn(&WholeMatrix, u64) -> u64,
    ) -> Option<Self> {
        let owners = Owners::of(plan, wholes, &select).expect("the model was checked");
        if owners.matrices().is_empty() {
            return None;
        }
        let held = |(unit, run): (UnitId, Range<usize>)| {
            let pieces = plan.updated_pieces(unit, Rank::new(run.start));
            let held = pieces.filter(|piece| select(ParamId { unit, index: piece.param }));
            (run, [held.map(|piece| piece.len as u64).sum()])
        };
        let [held] = ByUpdater::sums(runs(plan).map(held));
        let of_owner = owners.owned().map(|(owner, matrix)| {
            let words = match plan.spec()[matrix.param].state {
                State::Owned(words) => words as u64,
                _ => 0,
            };
            let amounts = [matrix.numel() as u64, own_part(plan, owner, matrix), words];
            (owner..owner + 1, amounts)
        });
        let [owned, both, words] = ByUpdater::sums(of_owner);
        let workspace = most(&owners, workspace);
        let largest = most(&owners, |matrix, count| count * matrix.numel() as u64);
        let square = |matrix: &WholeMatrix| (matrix.rows.min(matrix.columns) as u64).pow(2);
        let square = most(&owners, |matrix, count| count * square(matrix));
        Some(Self { copies, held, owned, both, words, workspace, largest, square })
    }

    fn flow(&self, updater: usize) -> Flow {
        let [held, owned, both] = [&self.held, &self.owned, &self.both].map(|it| it.at(updater));
        let elements = ElemCount(self.copies * (owned - both) + held - both);
        Flow { calls: 2, bytes: elements.bytes(DType::F32) }
    }

    fn extra(&self, updater: usize) -> ByteCount {
        let sent = self.copies * self.held.at(updater);
        let beside = sent.max(self.workspace.at(updater));
        let [owned, words] = [&self.owned, &self.words].map(|it| it.at(updater));
        let elements = ElemCount(self.copies * owned + words + beside);
        elements.bytes(DType::F32)
    }

    /// The results, from the end of the exchange to the update.
    fn staged(&self, updater: usize) -> ByteCount {
        let elements = self.held.at(updater) + self.words.at(updater);
        ElemCount(elements).bytes(DType::F32)
    }

    /// On the host, and on a device.
    fn extra_with_device(&self, updater: usize) -> [ByteCount; 2] {
        let all = [&self.held, &self.owned, &self.largest, &self.square];
        let [held, owned, largest, square] = all.map(|it| it.at(updater));
        let elements = [owned + held.max(largest), held + 2 * largest + 2 * square];
        elements.map(|elements| ElemCount(elements).bytes(DType::F32))
    }
}

/// Returns the most that a bundle of each rank has. `of` gets a matrix, and a number of matrices of
/// its shape in a bundle; with the number its result grows.
fn most(owners: &Owners, of: impl Fn(&WholeMatrix, u64) -> u64) -> ByUpdater {
    let mut counts = BTreeMap::<(usize, usize, usize), usize>::new();
    let mut all = BTreeMap::<usize, u64>::new();
    for (owner, matrix) in owners.owned() {
        let count = counts.entry((owner, matrix.rows, matrix.columns)).or_default();
        *count = matrix.at_once().min(*count + 1);
        let most = all.entry(owner).or_default();
        *most = of(matrix, *count as u64).max(*most);
    }
    let [most] = ByUpdater::sums(all.into_iter().map(|(owner, most)| (owner..owner + 1, [most])));
    most
}

/// Returns the number of elements of a matrix that its owner would update without an exchange.
fn own_part(plan: &Plan, owner: usize, matrix: &WholeMatrix) -> u64 {
    let unit = matrix.param.unit;
    let layout = plan.layout(unit);
    let rank = Rank::new(owner);
    let shard = plan.mesh().coordinate(rank).shard_index * layout.trainable().shard_len;
    let updated = plan.updated(unit, rank);
    let start = layout.params()[matrix.param.index].start + matrix.start;
    let end = (start + matrix.numel()).min(shard + updated.end);
    end.saturating_sub(start.max(shard + updated.start)) as u64
}

/// Returns the [runs](alike) of updaters of each unit that is updated.
fn runs(plan: &Plan) -> impl Iterator<Item = (UnitId, Range<usize>)> {
    let of_unit = |&unit| alike(plan, unit).into_iter().map(move |run| (unit, run));
    plan.reductions().iter().flat_map(of_unit)
}
