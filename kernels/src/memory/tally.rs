//! The counters: a pair for each rank and category, in a static table that needs no allocation.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use hsdp_sharding::{ByteCount, Rank};

/// The number of ranks whose memory is counted: ranks 0 to 1023.
pub const MAX_RANKS: usize = 1024;

/// The purpose for which memory is held. The names are those of a plan's memory formulas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Category {
    /// A rank's own parameters: the f32 master copy.
    Shard,
    /// A rank's own parameters in the compute dtype, which gathers read, where that is not the
    /// master copy itself.
    GatherInput,
    /// Gathered parameters, in the compute dtype.
    Full,
    /// Unsharded gradients that the runtime accumulates over microbatches.
    GradFull,
    /// Partials: sums of reduced gradients.
    Partial,
    /// The state of an optimizer.
    Optimizer,
    /// The exchange of whole matrices in an update, and the computation on them.
    Update,
    /// The values of a model's buffers, such as the running statistics of a batch norm.
    Buffers,
    /// Copies of shards and state that a checkpoint is written from.
    Snapshot,
    /// Parameters that were read from a checkpoint, until all ranks have read theirs and the shards
    /// take them.
    Load,
    /// Any other purpose. It is not counted.
    Other,
}

/// The memory that one rank holds in one category.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// The bytes that it holds now.
    pub live: ByteCount,
    /// The most bytes that it held at once since the last [`reset_peaks`].
    pub peak: ByteCount,
}

impl Category {
    /// Every category that is counted.
    pub const COUNTED: [Self; 10] = [
        Self::Shard,
        Self::GatherInput,
        Self::Full,
        Self::GradFull,
        Self::Partial,
        Self::Optimizer,
        Self::Update,
        Self::Buffers,
        Self::Snapshot,
        Self::Load,
    ];

    pub(super) const fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for Category {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Shard => "shard",
            Self::GatherInput => "gather_input",
            Self::Full => "full",
            Self::GradFull => "grad_full",
            Self::Partial => "partial",
            Self::Optimizer => "optimizer",
            Self::Update => "update",
            Self::Buffers => "buffers",
            Self::Snapshot => "snapshot",
            Self::Load => "load",
            Self::Other => "other",
        })
    }
}

/// The host memory that `rank` holds in `category`. Always zero for [`Category::Other`], for ranks
/// from [`MAX_RANKS`] on, and where the [allocator](super::CountingAllocator) is not installed.
///
/// The numbers are exact for allocations that happened before this call, in the sense of the memory
/// model. While other threads allocate, the two numbers may be from different moments.
pub fn usage(rank: Rank, category: Category) -> Usage {
    usage_in(&TALLIES, rank, category)
}

/// The device memory that `rank` holds in `category`, over all devices. The bytes of buffers'
/// elements are counted, without the spare bytes of their blocks. Always zero for
/// [`Category::Other`], and for ranks from [`MAX_RANKS`] on.
pub fn usage_on_device(rank: Rank, category: Category) -> Usage {
    usage_in(&ON_DEVICE, rank, category)
}

fn usage_in(table: &[Row; MAX_RANKS], rank: Rank, category: Category) -> Usage {
    let tally = table.get(rank.index()).and_then(|row| row.0.get(category.index()));
    Usage {
        live: ByteCount(tally.map_or(0, |tally| tally.live.load(Relaxed))),
        peak: ByteCount(tally.map_or(0, |tally| tally.peak.load(Relaxed))),
    }
}

/// All allocations of a process so far, inside and outside of scopes, freed or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocations {
    /// The number of allocations. Growing a block counts as one, shrinking does not count.
    pub count: u64,
    /// The bytes that these allocations added.
    pub bytes: ByteCount,
}

impl Allocations {
    /// The allocations since `earlier`, which an earlier call of [`allocations`] returned.
    ///
    /// # Panics
    ///
    /// If the bytes of `earlier` are more than these; in a debug build also if its count is larger.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self { count: self.count - earlier.count, bytes: self.bytes - earlier.bytes }
    }
}

/// The allocations of this process so far; zero where the [allocator](super::CountingAllocator) is
/// not installed. The numbers are exact for allocations that happened before this call, in the
/// sense of the memory model.
pub fn allocations() -> Allocations {
    Allocations { count: COUNT.load(Relaxed), bytes: ByteCount(BYTES.load(Relaxed)) }
}

static COUNT: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);

/// Counts an allocation of `size` bytes, in any scope or none.
pub(super) fn count_allocation(size: usize) {
    COUNT.fetch_add(1, Relaxed);
    BYTES.fetch_add(size as u64, Relaxed);
}

/// Sets every peak, of all ranks and categories, to the bytes that are held now. If another thread
/// allocates during the call, its peak may be lost.
pub fn reset_peaks() {
    lower_peaks(&TALLIES);
    lower_peaks(&ON_DEVICE);
}

fn lower_peaks(table: &[Row; MAX_RANKS]) {
    for tally in table.iter().flat_map(|row| &row.0) {
        tally.peak.store(tally.live.load(Relaxed), Relaxed);
    }
}

/// Limits the host memory that `rank` may hold in `category` to `bytes`; `None` removes the limit.
/// Beyond it the [allocator] returns null, as it does on a machine without free memory. The call
/// has no effect for [`Category::Other`], and for ranks from [`MAX_RANKS`] on.
///
/// Code that cannot handle a failed allocation aborts the process. The runtime's allocations of
/// gathered parameters, partials and gradients return an error instead.
///
/// [allocator]: super::CountingAllocator
pub fn set_budget(rank: Rank, category: Category, bytes: Option<ByteCount>) {
    let tally = TALLIES.get(rank.index()).and_then(|row| row.0.get(category.index()));
    if let Some(tally) = tally {
        tally.budget_complement.store(bytes.map_or(0, |bytes| !bytes.0), Relaxed);
    }
}

/// The counters to which an allocation belongs. The header of the allocation holds this.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BlockTag(u32);

impl BlockTag {
    /// Not counted.
    pub(super) const NONE: Self = Self(0);

    /// The counters of a rank and a category.
    #[expect(clippy::cast_possible_truncation, reason = "at most MAX_RANKS times 10, which fits")]
    pub(super) const fn new(rank: usize, category: Category) -> Self {
        match category {
            Category::Other => Self::NONE,
            _ if rank >= MAX_RANKS => Self::NONE,
            counted => Self((rank * COUNTED + counted.index() + 1) as u32),
        }
    }

    /// Whether the budget has no room for `size` more bytes. Concurrent allocations may together
    /// exceed the budget.
    pub(super) fn refuses(self, size: usize) -> bool {
        let Some(tally) = self.tally() else { return false };
        let live = tally.live.load(Relaxed);
        live.saturating_add(size as u64) > !tally.budget_complement.load(Relaxed)
    }

    /// Counts a new block of `size` bytes.
    pub(super) fn charge(self, size: usize) {
        if let Some(tally) = self.tally() {
            tally.charge(size);
        }
    }

    /// Counts that `size` bytes were freed.
    pub(super) fn refund(self, size: usize) {
        if let Some(tally) = self.tally() {
            tally.refund(size);
        }
    }

    fn tally(self) -> Option<&'static Tally> {
        self.tally_in(&TALLIES)
    }

    fn tally_in(self, table: &'static [Row; MAX_RANKS]) -> Option<&'static Tally> {
        let index = (self.0 as usize).checked_sub(1)?;
        table.get(index / COUNTED).map(|row| &row.0[index % COUNTED])
    }
}

/// The counters of a buffer on a device.
#[derive(Debug)]
pub(crate) struct DeviceCharge(BlockTag);

impl DeviceCharge {
    pub(super) fn new(tag: BlockTag, bytes: usize) -> Self {
        if let Some(tally) = tag.tally_in(&ON_DEVICE) {
            tally.charge(bytes);
        }
        Self(tag)
    }

    /// The charge of another library's memory, which is not counted.
    pub(crate) const fn nowhere() -> Self {
        Self(BlockTag::NONE)
    }

    /// Counts that `bytes` were freed.
    pub(crate) fn refund(&self, bytes: usize) {
        if let Some(tally) = self.0.tally_in(&ON_DEVICE) {
            tally.refund(bytes);
        }
    }
}

const COUNTED: usize = Category::COUNTED.len();

#[derive(Debug)]
struct Tally {
    live: AtomicU64,
    peak: AtomicU64,
    /// The complement of the bytes that may be live: with 0 for no limit, the table is all zeros,
    /// and takes no room in a program's file.
    budget_complement: AtomicU64,
}

impl Tally {
    const fn untouched() -> Self {
        let [live, peak, budget_complement] = [const { AtomicU64::new(0) }; 3];
        Self { live, peak, budget_complement }
    }

    fn charge(&self, size: usize) {
        // Each addition returns the sum that it makes, so the greatest sum is the peak, whatever
        // the order of threads.
        let live = self.live.fetch_add(size as u64, Relaxed) + size as u64;
        self.peak.fetch_max(live, Relaxed);
    }

    fn refund(&self, size: usize) {
        self.live.fetch_sub(size as u64, Relaxed);
    }
}

/// A rank's counters, on cache lines of their own: ranks do not slow one another down.
#[derive(Debug)]
#[repr(align(128))]
struct Row([Tally; COUNTED]);

static TALLIES: [Row; MAX_RANKS] =
    [const { Row([const { Tally::untouched() }; COUNTED]) }; MAX_RANKS];

static ON_DEVICE: [Row; MAX_RANKS] =
    [const { Row([const { Tally::untouched() }; COUNTED]) }; MAX_RANKS];
