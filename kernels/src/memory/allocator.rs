//! The counting allocator. It allocates from another, with a header in front of each block that
//! holds the block's rank and category.
//!
//! ```text
//!   base                        block = base + offset
//!   |                           |
//!   v                           v
//!   [ ...unused... ][ BlockTag: 4 B ][ the requested bytes ]
//! ```
//!
//! `offset` is 16, or the alignment if that is greater. So a block has the requested alignment, and
//! vectors are aligned as well as by the allocator below. `offset` follows from the layout alone,
//! which Rust passes with each block.

use std::alloc::{GlobalAlloc, Layout, System};
use std::{hint, ptr};

use super::scope;
use super::tally::{self, BlockTag};

/// A global allocator that counts the allocations made in a [`scope`](super::scope). All memory
/// comes from the allocator below it, by default that of the system.
///
/// It costs 16 bytes and two thread-local reads for each allocation. Zeroed memory stays as cheap
/// as that of the allocator below, and large blocks grow in place where its blocks do.
#[derive(Debug, Clone, Copy, Default)]
pub struct CountingAllocator<A = System> {
    below: A,
}

impl CountingAllocator {
    /// Counts what the system's allocator gives.
    #[must_use]
    pub const fn new() -> Self {
        Self::over(System)
    }
}

impl<A> CountingAllocator<A> {
    /// Counts what another allocator gives, such as one that keeps freed blocks.
    #[must_use]
    pub const fn over(below: A) -> Self {
        Self { below }
    }
}

/// The least distance from the start of an allocation to the block in it.
const HEADER: usize = 16;

// SAFETY: K-3 and K-4: a block is a fresh part of one allocation from below, aligned and large
// enough; blocks are freed and grown with the layout of their allocation; nothing here unwinds.
unsafe impl<A: GlobalAlloc> GlobalAlloc for CountingAllocator<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let Some((padded, tag)) = Padded::within_budget(layout) else { return ptr::null_mut() };
        // SAFETY: K-3, a padded layout is never empty.
        let base = unsafe { self.below.alloc(padded.layout) };
        // SAFETY: K-4, `base` is a new allocation of this layout, or null.
        unsafe { padded.admit(base, tag, layout.size()) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let Some((padded, tag)) = Padded::within_budget(layout) else { return ptr::null_mut() };
        // SAFETY: K-3, a padded layout is never empty.
        let base = unsafe { self.below.alloc_zeroed(padded.layout) };
        // SAFETY: K-4, `base` is a new allocation of this layout, or null.
        unsafe { padded.admit(base, tag, layout.size()) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        let Some(padded) = Padded::of(layout) else { return };
        let block = with_header(block);
        // SAFETY: K-4, the caller gives a live block with its layout.
        let base = unsafe { padded.base(block) };
        // SAFETY: K-4, as above.
        let tag = unsafe { padded.tag(base) };
        tag.refund(layout.size());
        // SAFETY: K-3, this is the allocation that the block is part of, and its layout.
        unsafe { self.below.dealloc(base, padded.layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        let Some(padded) = Padded::of(layout) else { return ptr::null_mut() };
        let Some(grown) = padded.resized(new_size) else { return ptr::null_mut() };
        let block = with_header(block);
        // SAFETY: K-4, the caller gives a live block with its layout.
        let base = unsafe { padded.base(block) };
        // SAFETY: K-4, as above; read now, since the old allocation may be gone afterwards.
        let tag = unsafe { padded.tag(base) };
        // A block that shrinks takes nothing, also where more is in use than the budget allows.
        if new_size > layout.size() && tag.refuses(new_size - layout.size()) {
            return ptr::null_mut();
        }
        // SAFETY: K-3, this is the allocation and its layout; the new size is not zero and does not
        // overflow.
        let base = unsafe { self.below.realloc(base, padded.layout, grown.layout.size()) };
        if base.is_null() {
            return base;
        }
        if new_size >= layout.size() {
            tag.charge(new_size - layout.size());
            tally::count_allocation(new_size - layout.size());
        } else {
            tag.refund(layout.size() - new_size);
        }
        // SAFETY: K-3, the offset is within the new allocation, which begins with a copy of the
        // header.
        unsafe { base.add(grown.offset) }
    }
}

/// The same block, of which the compiler no longer knows that it is new memory. Where it sees both
/// the allocation and this use, it takes the header, which lies before the block, for memory that
/// nothing has written.
#[inline(always)]
fn with_header(block: *mut u8) -> *mut u8 {
    hint::black_box(block)
}

/// The layout of an allocation with its header, and the offset of the block in it.
#[derive(Debug, Clone, Copy)]
struct Padded {
    layout: Layout,
    offset: usize,
}

impl Padded {
    /// `None` if the size would overflow, which the caller reports as being out of memory.
    fn of(layout: Layout) -> Option<Self> {
        let align = layout.align().max(align_of::<BlockTag>());
        let offset = align.max(HEADER);
        let size = layout.size().checked_add(offset)?;
        let layout = Layout::from_size_align(size, align).ok()?;
        Some(Self { layout, offset })
    }

    /// The padded layout, and the tag of the counters; also `None` if their budget has no room for
    /// the block.
    fn within_budget(layout: Layout) -> Option<(Self, BlockTag)> {
        let tag = scope::current();
        if tag.refuses(layout.size()) {
            return None;
        }
        Some((Self::of(layout)?, tag))
    }

    /// The padded layout for a block of another size, with the same alignment and offset.
    fn resized(self, size: usize) -> Option<Self> {
        let size = size.checked_add(self.offset)?;
        let layout = Layout::from_size_align(size, self.layout.align()).ok()?;
        Some(Self { layout, ..self })
    }

    /// Writes the header, counts the block, and returns it. Returns null if `base` is null.
    ///
    /// # Safety
    ///
    /// K-4: `base` is null, or an allocation of this layout that has no other user; `size` is that
    /// of the block.
    unsafe fn admit(self, base: *mut u8, tag: BlockTag, size: usize) -> *mut u8 {
        if base.is_null() {
            return base;
        }
        // SAFETY: K-3, the header is within the allocation.
        let header = unsafe { self.header(base) };
        // SAFETY: K-4, the header is aligned, and the allocation has no other user yet.
        unsafe { header.write(tag) };
        tag.charge(size);
        tally::count_allocation(size);
        // SAFETY: K-3, the offset is within the allocation.
        unsafe { base.add(self.offset) }
    }

    /// The start of the allocation of a block.
    ///
    /// # Safety
    ///
    /// K-4: `block` came from [`admit`](Self::admit) with this layout, and is not freed.
    unsafe fn base(self, block: *mut u8) -> *mut u8 {
        // SAFETY: K-3, the block lies at this offset of its allocation.
        unsafe { block.sub(self.offset) }
    }

    /// The tag of the counters of an allocation.
    ///
    /// # Safety
    ///
    /// K-4: `base` is the start of a live allocation of this layout.
    unsafe fn tag(self, base: *mut u8) -> BlockTag {
        // SAFETY: K-3, the header is within the allocation.
        let header = unsafe { self.header(base) };
        // SAFETY: K-4, it was written when the block was given out; the block's user never reaches
        // it.
        unsafe { header.read() }
    }

    /// The header of an allocation: the four bytes just before the block.
    ///
    /// # Safety
    ///
    /// K-3: `base` is the start of an allocation of this layout.
    unsafe fn header(self, base: *mut u8) -> *mut BlockTag {
        // SAFETY: K-3, the offset is at least the size of a tag, and a multiple of its alignment,
        // as `base` is.
        unsafe { base.add(self.offset - size_of::<BlockTag>()) }.cast()
    }
}
