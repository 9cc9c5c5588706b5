//! The counters: one pair for each rank and category, in a static table that needs no allocation.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use hsdp_sharding::{ByteCount, Rank};

/// How many ranks of one process are counted apart.
pub const MAX_RANKS: usize = 1024;

/// What memory is held for. The names are those of a plan's memory formulas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Category {
    /// A rank's own parameters: the f32 master copy.
    Shard,
    /// The same in the compute dtype, where that is another: what gathers read.
    GatherInput,
    /// Gathered parameters, in the compute dtype.
    Full,
    /// Unsharded gradients that the runtime accumulates.
    GradFull,
    /// Sums of reduced gradients.
    Partial,
    /// The state of an optimizer.
    Optimizer,
    /// Copies of shards and state that a checkpoint is written from.
    Snapshot,
    /// Anything else. It is not counted.
    Other,
}

/// What one rank holds in one category.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// What it holds now.
    pub live: ByteCount,
    /// The most that it held at once since the last [`reset_peaks`].
    pub peak: ByteCount,
}

impl Category {
    /// Every category that is counted.
    pub const COUNTED: [Self; 7] = [
        Self::Shard,
        Self::GatherInput,
        Self::Full,
        Self::GradFull,
        Self::Partial,
        Self::Optimizer,
        Self::Snapshot,
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
            Self::Snapshot => "snapshot",
            Self::Other => "other",
        })
    }
}

/// What `rank` holds in `category`, in the memory of the process. Always zero for [`Category::Other`], and for a rank from
/// [`MAX_RANKS`] on.
///
/// Exact for what happened before this call, in the sense of the memory model; while other threads allocate, the two
/// numbers may be from different moments.
pub fn usage(rank: Rank, category: Category) -> Usage {
    usage_in(&TALLIES, rank, category)
}

/// The same of buffers on devices: their elements, without what their blocks have beyond these.
#[cfg(feature = "cuda")]
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

/// What a process has allocated, in any scope and in none, freed or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocations {
    /// How often memory was asked for; growing counts, shrinking does not.
    pub count: u64,
    /// How much of it.
    pub bytes: ByteCount,
}

impl Allocations {
    /// What came since an earlier look.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self { count: self.count - earlier.count, bytes: self.bytes - earlier.bytes }
    }
}

/// What this process has allocated so far. Exact for what happened before this call, in the sense of the memory model.
pub fn allocations() -> Allocations {
    Allocations { count: COUNT.load(Relaxed), bytes: ByteCount(BYTES.load(Relaxed)) }
}

static COUNT: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);

/// Counts an allocation of `size` bytes, whatever it is for.
pub(super) fn count_allocation(size: usize) {
    COUNT.fetch_add(1, Relaxed);
    BYTES.fetch_add(size as u64, Relaxed);
}

/// Lowers every peak to what is held now. Call it while no other thread allocates, or peaks of that moment may be lost.
pub fn reset_peaks() {
    lower_peaks(&TALLIES);
    #[cfg(feature = "cuda")]
    lower_peaks(&ON_DEVICE);
}

fn lower_peaks(table: &[Row; MAX_RANKS]) {
    for tally in table.iter().flat_map(|row| &row.0) {
        tally.peak.store(tally.live.load(Relaxed), Relaxed);
    }
}

/// Lets `rank` hold at most `bytes` in `category`, or anything again (`None`): beyond that the [allocator] refuses, as a
/// machine without more memory does. Nothing happens for [`Category::Other`], or a rank from [`MAX_RANKS`] on.
///
/// Code that cannot do without ends the process when it is refused. What the runtime allocates for gathered parameters,
/// partials and gradients can.
///
/// [allocator]: super::CountingAllocator
pub fn set_budget(rank: Rank, category: Category, bytes: Option<ByteCount>) {
    let tally = TALLIES.get(rank.index()).and_then(|row| row.0.get(category.index()));
    if let Some(tally) = tally {
        tally.budget.store(bytes.map_or(u64::MAX, |bytes| bytes.0), Relaxed);
    }
}

/// Which counters an allocation belongs to, as it is kept in front of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tag(u32);

impl Tag {
    /// Not counted.
    pub(super) const NONE: Self = Self(0);
    /// Not counted, but seen: how [`is_installed`](super::is_installed) finds out.
    pub(super) const PROBE: Self = Self(u32::MAX);

    /// The counters of a rank, which is below [`MAX_RANKS`], and a category.
    #[expect(clippy::cast_possible_truncation, reason = "at most MAX_RANKS times 8, which fits")]
    pub(super) const fn new(rank: usize, category: Category) -> Self {
        match category {
            Category::Other => Self::NONE,
            counted => Self((rank * COUNTED + counted.index() + 1) as u32),
        }
    }

    /// Whether the budget has no room for `size` more bytes. Allocations at the same moment may all fit by themselves.
    pub(super) fn refuses(self, size: usize) -> bool {
        let Some(tally) = self.tally() else { return false };
        let live = tally.live.load(Relaxed);
        live.saturating_add(size as u64) > tally.budget.load(Relaxed)
    }

    /// Counts a new block of `size` bytes.
    pub(super) fn charge(self, size: usize) {
        if let Some(tally) = self.tally() {
            tally.charge(size);
        }
    }

    /// Counts that `size` bytes are gone.
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

/// Where bytes on a device were counted.
#[cfg(feature = "cuda")]
#[derive(Debug)]
pub(crate) struct DeviceCharge(Tag);

#[cfg(feature = "cuda")]
impl DeviceCharge {
    pub(super) fn new(tag: Tag, bytes: usize) -> Self {
        if let Some(tally) = tag.tally_in(&ON_DEVICE) {
            tally.charge(bytes);
        }
        Self(tag)
    }

    /// Of memory that is another library's.
    pub(crate) const fn nowhere() -> Self {
        Self(Tag::NONE)
    }

    /// Counts that they are gone.
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
    /// The most that may be live.
    budget: AtomicU64,
}

impl Tally {
    const fn untouched() -> Self {
        let budget = AtomicU64::new(u64::MAX);
        Self { live: AtomicU64::new(0), peak: AtomicU64::new(0), budget }
    }

    fn charge(&self, size: usize) {
        // Each addition sees the sum that it makes, so the greatest of them is the peak, whatever the order of threads.
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

#[cfg(feature = "cuda")]
static ON_DEVICE: [Row; MAX_RANKS] =
    [const { Row([const { Tally::untouched() }; COUNTED]) }; MAX_RANKS];
