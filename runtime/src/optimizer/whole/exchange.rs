//! The exchange of matrices between the ranks that hold their parts and their owners: one all-to-all there, and one back.

use std::collections::BTreeMap;
use std::ops::Range;

use hsdp_comm::{Lent, Stage, Tag};
use hsdp_kernels::memory::{self, Category};
use hsdp_sharding::{Owners, ParamId, Part, Piece, UnitId, WholeMatrix, Wholes};

use crate::engine::fabric::Fabric;
use crate::error::Error;

/// The exchange of the matrices of one optimizer, the same in every step.
#[derive(Clone, Debug)]
pub(in crate::optimizer) struct Exchange {
    owners: Owners,
    /// This rank's place in the shard group.
    index: usize,
    /// By owner: the parts that this rank sends.
    sent: Vec<Vec<Part>>,
    /// By member: the parts that this rank receives.
    received: Vec<Vec<Part>>,
    /// By unit and first element in the shard: each part that this rank sends, and the place of its first element in the buffer.
    places: BTreeMap<(UnitId, usize), (Part, usize)>,
}

/// A matrix on its owner.
pub(in crate::optimizer) struct OnOwner<'a> {
    pub(in crate::optimizer) matrix: &'a WholeMatrix,
    /// Its elements, row-major.
    pub(in crate::optimizer) values: &'a mut [f32],
}

impl Exchange {
    /// The exchange of the matrices of these parameters.
    ///
    /// # Errors
    /// [`Error::Plan`](Error) for a parameter that has no matrices.
    pub(in crate::optimizer) fn of(
        fabric: &Fabric,
        has: impl Fn(ParamId) -> bool,
    ) -> Result<Self, Error> {
        let plan = &fabric.plan;
        let owners = Owners::of(plan, Wholes::Matrices, has)?;
        let index = plan.mesh().coordinate(fabric.rank()).shard_index;
        let from = |member| std::mem::take(&mut owners.sent_by(plan, member)[index]);
        let received = (0..plan.mesh().shard_size()).map(from).collect();
        let sent = owners.sent_by(plan, index);
        let places = places_of(&sent);
        Ok(Self { owners, index, sent, received, places })
    }

    /// The matrix of a part.
    pub(in crate::optimizer) fn matrix(&self, part: &Part) -> &WholeMatrix {
        &self.owners.matrices()[part.matrix]
    }

    /// The parts in a run of elements of this rank's shard, in order: each with its range in the run, and its elements in a buffer of all
    /// parts that this rank sends.
    pub(in crate::optimizer) fn within(
        &self,
        unit: UnitId,
        run: &Piece,
    ) -> impl Iterator<Item = (&Part, Range<usize>, Range<usize>)> {
        let held = run.shard_range();
        let before = self.places.range(..=(unit, held.start)).next_back();
        let first = before.map_or((unit, held.start), |(key, _)| *key);
        let parts = self.places.range(first..(unit, held.end)).map(|(_, place)| place);
        let overlaps =
            move |(part, _): &&(Part, usize)| part.unit == unit && part.shard.end > held.start;
        parts.filter(overlaps).map(move |(part, at)| {
            let (start, end) = (part.shard.start.max(held.start), part.shard.end.min(held.end));
            let from = at + start - part.shard.start;
            (part, start - held.start..end - held.start, from..from + end - start)
        })
    }

    /// Brings parts to their owners, computes each matrix there, and brings the parts back. `fill` writes the elements of a part of
    /// this rank, and `compute` replaces the elements of a matrix that this rank owns; its last argument is a workspace of as many
    /// elements as `workspace` says. Returns the new elements of the parts, in the order in which they were sent. Collective over the
    /// shard group.
    ///
    /// # Errors
    /// [`Error::Comm`]; [`Error::Kernel`] if there is no memory.
    pub(in crate::optimizer) fn run(
        &self,
        (fabric, step): (&Fabric, u64),
        fill: impl FnMut(&Part, &mut [f32]) -> Result<(), Error>,
        workspace: impl Fn(&WholeMatrix) -> usize,
        mut compute: impl FnMut(OnOwner<'_>, &mut [f32]),
    ) -> Result<Vec<f32>, Error> {
        let tag = fabric.tag(None, Stage::Update, step, 0);
        let mut owned = self.there(fabric, tag, fill)?;
        let owns = |at: &usize| self.owners.owner(*at) == self.index;
        for at in (0..self.owners.matrices().len()).filter(owns) {
            let matrix = &self.owners.matrices()[at];
            let (mut values, mut room) = (zeros(matrix.numel())?, zeros(workspace(matrix))?);
            self.each_received(at, &mut owned, |start, part| {
                values[start..start + part.len()].copy_from_slice(part);
            });
            compute(OnOwner { matrix, values: &mut values }, &mut room);
            self.each_received(at, &mut owned, |start, part| {
                part.copy_from_slice(&values[start..start + part.len()]);
            });
        }
        self.exchange(fabric, tag, (owned, [&self.received, &self.sent]))
    }

    /// Brings the parts of this rank to their owners. Returns those that this rank owns, in the order of `received`.
    fn there(
        &self,
        fabric: &Fabric,
        tag: Tag,
        mut fill: impl FnMut(&Part, &mut [f32]) -> Result<(), Error>,
    ) -> Result<Vec<f32>, Error> {
        let mut values = zeros(total(&self.sent))?;
        let mut rest = &mut *values;
        for part in self.sent.iter().flatten() {
            let (into, behind) = rest.split_at_mut(part.shard.len());
            fill(part, into)?;
            rest = behind;
        }
        self.exchange(fabric, tag, (values, [&self.sent, &self.received]))
    }

    fn exchange(
        &self,
        fabric: &Fabric,
        tag: Tag,
        (source, [send, receive]): (Vec<f32>, [&[Vec<Part>]; 2]),
    ) -> Result<Vec<f32>, Error> {
        let lent = Lent { source, target: zeros(total(receive))? };
        let [send, receive] =
            [send, receive].map(|all| all.iter().map(|parts| len(parts)).collect());
        Ok(fabric.reduce.all_to_all_into(tag, lent, send, receive)?.wait()?.target)
    }

    /// Calls `act` for each part of a matrix that has come, with its first element in the matrix.
    fn each_received(
        &self,
        matrix: usize,
        received: &mut [f32],
        mut act: impl FnMut(usize, &mut [f32]),
    ) {
        let mut at = 0;
        for part in self.received.iter().flatten() {
            let range = at..at + part.shard.len();
            at = range.end;
            if part.matrix == matrix {
                act(part.start, &mut received[range]);
            }
        }
    }
}

/// The places of parts in a buffer in which they lie one after the other.
fn places_of(sent: &[Vec<Part>]) -> BTreeMap<(UnitId, usize), (Part, usize)> {
    let mut at = 0;
    let place = |part: &Part| {
        let own = at;
        at += part.shard.len();
        ((part.unit, part.shard.start), (part.clone(), own))
    };
    sent.iter().flatten().map(place).collect()
}

/// The elements of parts.
fn len(parts: &[Part]) -> usize {
    parts.iter().map(|part| part.shard.len()).sum()
}

fn total(parts: &[Vec<Part>]) -> usize {
    parts.iter().map(|parts| len(parts)).sum()
}

/// A buffer of an exchange, which counts as such. A matrix product may start a pool of threads, and keeps buffers that do not count.
fn zeros(len: usize) -> Result<Vec<f32>, Error> {
    let _update = memory::scope(Category::Update);
    Ok(hsdp_kernels::zeros(len)?)
}
