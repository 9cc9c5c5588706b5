//! The operation that combines the members' elements and of which each gets its part: reduce_scatter.

use hsdp_kernels::{DisjointVec, Element};

use super::member_buffers::{MemberBuffers, Source};
use super::reduce::combine;
use super::{BLOCK_BYTES, Cuts, Meter, Outputs, PerMember, Work, one_length, take};
use crate::Reduction;

/// A reduction of which each member gets its part.
pub(crate) struct ReduceScatter<T> {
    sources: Vec<Source<T>>,
    targets: Vec<DisjointVec<T>>,
    reduction: Reduction,
    /// Of the targets.
    cuts: Cuts,
}

impl<T: Element> ReduceScatter<T> {
    /// # Errors
    /// If the targets differ in length, or a source is not as long as all of them together.
    pub(crate) fn new(
        members: Vec<MemberBuffers<T>>,
        reduction: Reduction,
    ) -> Result<Self, String> {
        let target_len = |it: &MemberBuffers<T>| it.target.as_ref().map_or(0, Vec::len);
        let part = one_length(members.iter().map(target_len))?;
        let whole = one_length(members.iter().map(|it| it.source.len()))?;
        if whole != part * members.len() {
            return Err(format!("{whole} elements cannot be {} parts of {part}", members.len()));
        }
        let cuts = Cuts { len: part, block_len: BLOCK_BYTES / size_of::<T>() };
        let disjoint = |it: MemberBuffers<T>| (it.source, it.target.unwrap_or_default().into());
        let (sources, targets) = members.into_iter().map(disjoint).unzip();
        Ok(Self { sources, targets, reduction, cuts })
    }
}

impl<T: Element> Work for ReduceScatter<T> {
    type Output = MemberBuffers<T>;

    fn blocks(&self) -> usize {
        self.targets.len() * self.cuts.each()
    }

    fn bytes(&self) -> usize {
        self.sources[0].len() * size_of::<T>()
    }

    fn run(&self, block: usize, _meter: &Meter<'_>) {
        let (owner, range) = self.cuts.block(block);
        // SAFETY: CO-2, blocks of one target do not overlap, and each is run once.
        let target = unsafe { take(&self.targets[owner], range.clone()) };
        let start = owner * self.cuts.len + range.start;
        let sources = self.sources.iter().map(Source::elements);
        let sources: PerMember<&[T]> = sources.map(|it| &it[start..start + range.len()]).collect();
        combine(self.reduction, target, &sources);
    }

    fn finish(self) -> Outputs<MemberBuffers<T>> {
        let targets = self.targets.into_iter().map(DisjointVec::into_vec);
        let members = self.sources.into_iter().zip(targets);
        members.map(|(source, target)| MemberBuffers::done(source, Some(target))).collect()
    }
}
