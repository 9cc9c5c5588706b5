//! Gathers in place: each member owns a part of a buffer, and gets the parts of the others.

use std::mem;
use std::ops::ControlFlow::Break;
use std::ops::Range;
use std::sync::Arc;

use hsdp_kernels::{DisjointBuffer, HostBuffer, ValuesMut, copy_all_past_caches};

use super::{
    AfterRound, At, Contribute, MemberSays, Meter, Outputs, PAST_CACHES, PerMember, Received, Work,
    block_elements, blocks_of, take_values,
};
use crate::bytes::{bytes_of, values};
use crate::lease::Leased;
use crate::pattern::{Pattern, nth};

/// The contribution of a member: its buffer, in which its own part is valid.
pub(crate) struct PartsContribution {
    /// Starts of the members' parts, and the end of the last one.
    pub(crate) cuts: Arc<[usize]>,
    pub(crate) buffer: Leased<HostBuffer>,
}

impl Contribute for PartsContribution {
    /// The buffer returns to its lease.
    type Gets = ();
    type Work = PartsGather;
    const FUNCTION: u8 = 8;

    fn pattern<'a>(&'a self, plain: Pattern<'a>) -> Pattern<'a> {
        plain.cut(&self.cuts)
    }

    fn note(&self) -> u64 {
        digest(&self.cuts)
    }

    fn introduce(all: &mut [Self]) -> Result<(), String> {
        one_cut(all.len(), |slot| &*all[slot].cuts)
    }

    fn assemble(all: Vec<Self>, at: At<'_>) -> Result<PartsGather, String> {
        Ok(PartsGather::of(all, at))
    }

    fn pack(&self, _at: At<'_>, _to: usize, range: Range<usize>, body: &mut [u8]) {
        body.copy_from_slice(bytes_of(self.buffer.values().slice(range)));
    }

    fn learn<'a>(
        &mut self,
        at: At<'_>,
        said: impl Fn(usize) -> MemberSays<'a>,
    ) -> Result<(), String> {
        one_cut(at.ranks.len(), |slot| said(slot).note)
    }

    fn unpack(mut self, at: At<'_>, received: &Received<'_>) -> AfterRound<Self> {
        let dtype = self.buffer.dtype();
        // As many bytes as all members write together, from the same caches if they are processes
        // of one machine.
        let filled = at.actual.counts.total() * dtype.size_bytes() * at.ranks.len();
        let is_large = filled > PAST_CACHES;
        let cuts = Arc::clone(&self.cuts);
        for from in at.pattern().others() {
            let target = self.buffer.values_mut().slice(nth(&cuts, from));
            let source = values(dtype, received.bytes(from));
            match is_large {
                true => copy_all_past_caches([(target, source)]),
                false => target.copy_from(source),
            }
        }
        Break(())
    }

    fn alone(self, _at: At<'_>) {}
}

/// Returns a hash of cuts.
pub(crate) fn digest(cuts: &[usize]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytemuck::cast_slice(cuts))
}

/// Checks that all members cut their buffers alike.
///
/// # Errors
/// If two members differ in their cuts, or the digests of these, in words that go before
/// "in operation ...".
pub(crate) fn one_cut<T: PartialEq>(
    members: usize,
    cuts: impl Fn(usize) -> T,
) -> Result<(), String> {
    match (1..members).find(|slot| cuts(*slot) != cuts(0)) {
        Some(slot) => Err(format!("members 0 and {slot} cut their buffers in different places")),
        None => Ok(()),
    }
}

/// Every member's part, copied into the buffers of all others.
pub(crate) struct PartsGather {
    /// Buffers by slot.
    members: PerMember<PartsMember>,
    /// Bytes that all blocks write.
    bytes: usize,
    /// Ranges of parts, each with the slot of its owner.
    blocks: Vec<(usize, Range<usize>)>,
    /// Whether elements are best written past the caches.
    is_past_caches: bool,
}

/// A member's buffer, in which several threads read and write at once.
struct PartsMember {
    buffer: DisjointBuffer,
    /// An empty buffer, until the member's own is put back.
    leased: Leased<HostBuffer>,
}

impl From<Leased<HostBuffer>> for PartsMember {
    fn from(mut leased: Leased<HostBuffer>) -> Self {
        let buffer = mem::replace(&mut *leased, HostBuffer::F32(Vec::new()));
        Self { buffer: buffer.into(), leased }
    }
}

/// No thread uses the buffer (CO-1), which returns to its lease.
impl Drop for PartsMember {
    fn drop(&mut self) {
        let empty = DisjointBuffer::F32(Vec::new().into());
        *self.leased = mem::replace(&mut self.buffer, empty).into_buffer();
    }
}

impl PartsGather {
    fn of(all: Vec<PartsContribution>, at: At<'_>) -> Self {
        let cuts = Arc::clone(&all[0].cuts);
        let len = cuts[all.len()];
        let bytes = len * (all.len() - 1) * at.pattern().element_bytes(0);
        let owners = 0..all.len();
        let blocks = owners.flat_map(|owner| {
            blocks_of(nth(&cuts, owner), block_elements(len)).map(move |range| (owner, range))
        });
        let blocks = blocks.collect();
        let members = all.into_iter().map(|it| PartsMember::from(it.buffer)).collect();
        Self { members, bytes, blocks, is_past_caches: bytes > PAST_CACHES }
    }
}

impl Work for PartsGather {
    type Gets = ();

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    /// Reads the block once from memory, and writes it for every other member while it is in the
    /// cache.
    fn run(&self, block: usize, _meter: &Meter<'_>) {
        let (owner, range) = self.blocks[block].clone();
        let parts = self.members.iter().map(|member| {
            // SAFETY: CO-2, blocks do not overlap, each is run once, and members have different
            // buffers.
            unsafe { take_values(&member.buffer, range.clone()) }
        });
        let mut others: PerMember<ValuesMut<'_>> = parts.collect();
        let source = others.remove(owner);
        let copies = others.into_iter().map(|target| (target, source.as_values()));
        match self.is_past_caches {
            true => copy_all_past_caches(copies),
            false => copies.for_each(|(target, source)| target.copy_from(source)),
        }
    }

    /// Returns the buffers to their leases.
    fn finish(self) -> Outputs<()> {
        self.members.into_iter().map(drop).collect()
    }
}
