//! The ranks that update whole matrices.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use super::Plan;
use crate::{ElemCount, Error, Param, ParamId, Piece, Rank, Role, UnitId};

/// The part of a model that one rank updates as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wholes {
    /// Each [matrix](Param::as_matrices) of a parameter.
    Matrices,
    /// Each parameter. As a matrix it has the columns of its [matrices](Param::as_matrices), and
    /// the rows of all of them; a parameter without matrices is one row.
    Parameters,
}

/// The most elements of the matrices that an owner computes together, unless one alone has more. A
/// product of this size occupies all cores of a host, or a whole card, by itself. The elements take
/// 16 MiB.
const ELEMENTS_AT_ONCE: usize = 1 << 22;

/// A matrix that one rank updates as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WholeMatrix {
    /// The parameter that holds it.
    pub param: ParamId,
    /// Its first element, counted from the parameter's start.
    pub start: usize,
    /// Its rows.
    pub rows: usize,
    /// Its columns: consecutive elements.
    pub columns: usize,
}

impl WholeMatrix {
    /// The number of its elements.
    #[must_use]
    pub const fn numel(&self) -> usize {
        self.rows * self.columns
    }

    /// The range of its elements in the parameter.
    #[must_use]
    pub const fn range(&self) -> Range<usize> {
        self.start..self.start + self.numel()
    }

    /// The f32 that Newton-Schulz steps (Muon) need: the matrix, whose parts come from several
    /// ranks, a square of its smaller dim m, and m rows of max(m, min(256, n)) columns, for the
    /// larger dim n.
    #[must_use]
    pub fn workspace(&self) -> ElemCount {
        let small = self.rows.min(self.columns);
        let large = self.rows.max(self.columns);
        ElemCount::of(self.numel() + small * (small + small.max(large.min(256))))
    }

    /// The number of matrices of this shape that an owner orthogonalizes together: as many as have
    /// 2^22 elements, and at least one.
    #[must_use]
    pub fn at_once(&self) -> usize {
        (ELEMENTS_AT_ONCE / self.numel().max(1)).max(1)
    }

    /// The multiplications of a Newton-Schulz step: m · m · (2 n + m), for the smaller dim m and
    /// the larger n. For these there are a product of m x n and n x m, one of m x m and m x m, and
    /// one of m x m and m x n.
    fn cost(&self) -> u128 {
        let small = self.rows.min(self.columns) as u128;
        let large = self.rows.max(self.columns) as u128;
        small * small * (2 * large + small)
    }
}

/// The part of a matrix among the elements that a rank [updates](Plan::updated).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    /// The matrix: its index in [`Owners::matrices`].
    pub matrix: usize,
    /// The unit whose shard holds the part.
    pub unit: UnitId,
    /// The elements of the shard. Trainable elements come first in a shard, so they have the same
    /// indices in its partial.
    pub shard: Range<usize>,
    /// The first element, counted from the start of the matrix.
    pub start: usize,
}

/// The rank that updates each of some matrices, its owner: one of the ranks that together hold each
/// element once ([`Plan::updaters`]).
///
/// The matrices are dealt out by the longest processing time first (Graham, Bounds on
/// Multiprocessing Timing Anomalies, 1969): in the order of falling cost, equal costs in declared
/// order, each matrix goes to the rank with the least cost so far, of several to the lowest. So no
/// rank has more than 4/3 - 1/(3 S) of the least possible maximum over S ranks. The cost of a
/// matrix is that of a Newton-Schulz step, m · m · (2 n + m) for the smaller dim m and the larger
/// n.
///
/// ```
/// use hsdp_sharding::{Mesh, ModelSpec, Owners, Param, Plan, PlanOptions, Unit, Wholes};
/// let unit = Unit::new("u").param(Param::new("a", [4, 4])).param(Param::new("b", [8, 8]));
/// let plan = Plan::new(ModelSpec::new().unit(unit), Mesh::new(1, 2)?, PlanOptions::default())?;
/// let owners = Owners::of(&plan, Wholes::Matrices, |_| true)?;
/// assert_eq!([owners.owner(0), owners.owner(1)], [1, 0]); // the larger one first
/// // Shard 1 has the last 32 of the 64 elements of `b`.
/// let sent = owners.sent_by(&plan, 1);
/// assert_eq!((sent[0][0].matrix, sent[0][0].start), (1, 32));
/// # Ok::<(), hsdp_sharding::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Owners {
    matrices: Vec<WholeMatrix>,
    owners: Vec<usize>,
}

impl Owners {
    /// Deals out the matrices of the selected trainable parameters over the
    /// [updaters](Plan::updaters) of a plan. It is a pure function of its arguments, and the same
    /// on every rank.
    ///
    /// # Errors
    /// [`Error::NoMatrices`] for the first selected trainable parameter that has no matrices, with
    /// [`Wholes::Matrices`].
    pub fn of(
        plan: &Plan,
        wholes: Wholes,
        select: impl Fn(ParamId) -> bool,
    ) -> Result<Self, Error> {
        let mut matrices = Vec::new();
        for (id, param) in plan.spec().params() {
            if param.role == Role::Trainable && select(id) {
                matrices.extend(of_param(id, param, wholes)?);
            }
        }
        let owners = dealt(&matrices, plan.updaters());
        Ok(Self { matrices, owners })
    }

    /// The matrices, in declared order.
    #[must_use]
    pub fn matrices(&self) -> &[WholeMatrix] {
        &self.matrices
    }

    /// Returns the owner of a matrix, by its index among the [updaters](Plan::updater).
    ///
    /// # Panics
    /// If there is no such matrix.
    #[must_use]
    pub fn owner(&self, matrix: usize) -> usize {
        self.owners[matrix]
    }

    /// The matrices with their owners, in declared order.
    pub(super) fn owned(&self) -> impl Iterator<Item = (usize, &WholeMatrix)> {
        self.owners.iter().copied().zip(&self.matrices)
    }

    /// Returns the parts that the updater at `index` sends to each owner, by the owner's index, in
    /// the order of matrices. The owner receives from it exactly these parts in this order. `plan`
    /// is the one that the owners are of.
    ///
    /// # Panics
    /// If `index` is not below the number of [updaters](Plan::updaters).
    #[must_use]
    pub fn sent_by(&self, plan: &Plan, index: usize) -> Vec<Vec<Part>> {
        let updaters = plan.updaters();
        assert!(index < updaters, "updater {index} of {updaters}");
        let mut sent = vec![Vec::new(); updaters];
        for unit in plan.spec().unit_ids() {
            // The ranks of the first shard group have their indices in it as numbers.
            for piece in plan.updated_pieces(unit, Rank::new(index)) {
                for part in self.parts(unit, piece) {
                    sent[self.owner(part.matrix)].push(part);
                }
            }
        }
        sent
    }

    /// The parts of matrices in a piece of a shard, in order.
    fn parts(&self, unit: UnitId, piece: Piece) -> impl Iterator<Item = Part> {
        let param = ParamId { unit, index: piece.param };
        let held = piece.param_range();
        let is_before =
            |whole: &WholeMatrix| (whole.param, whole.range().end) <= (param, held.start);
        let first = self.matrices.partition_point(is_before);
        let end = held.end;
        let overlapping = self.matrices[first..]
            .iter()
            .take_while(move |whole| whole.param == param && whole.start < end);
        overlapping.zip(first..).map(move |(whole, matrix)| {
            let start = held.start.max(whole.start);
            let end = held.end.min(whole.range().end);
            let in_shard = |element| piece.shard_start + element - held.start;
            let shard = in_shard(start)..in_shard(end);
            Part { matrix, unit, shard, start: start - whole.start }
        })
    }
}

/// The wholes of a parameter, in order.
fn of_param(
    param: ParamId,
    declared: &Param,
    wholes: Wholes,
) -> Result<impl Iterator<Item = WholeMatrix> + use<>, Error> {
    let (count, rows, columns) = match (wholes, declared.as_matrices()) {
        (Wholes::Matrices, Some(of)) => (of.count, of.rows, of.columns),
        (Wholes::Matrices, None) => return Err(declared.no_matrices()),
        (Wholes::Parameters, Some(of)) => (1, of.count * of.rows, of.columns),
        (Wholes::Parameters, None) => (1, 1, declared.numel()),
    };
    let whole = move |index| WholeMatrix { param, start: index * rows * columns, rows, columns };
    Ok((0..count).map(whole))
}

/// The owner of each matrix. As many ranks as there are matrices are enough: of ranks without a
/// matrix the lowest gets the next.
fn dealt(matrices: &[WholeMatrix], updaters: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..matrices.len()).collect();
    order.sort_by_key(|&matrix| Reverse(matrices[matrix].cost()));
    let ranks = 0..updaters.min(matrices.len());
    let mut least: BinaryHeap<_> = ranks.map(|rank| Reverse((0u128, rank))).collect();
    let mut owners = vec![0; matrices.len()];
    for matrix in order {
        let Some(mut entry) = least.peek_mut() else { break };
        let Reverse((sum, rank)) = &mut *entry;
        owners[matrix] = *rank;
        *sum += matrices[matrix].cost();
    }
    owners
}
