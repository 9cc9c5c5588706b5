//! How much memory each rank holds, by category, measured by the allocator itself.
//!
//! A plan predicts peaks; here they are measured by other means than the plan's. A program (a test, an example) installs
//! [`CountingAllocator`]; code that allocates something worth counting opens a [`scope`] around it:
//!
//! ```
//! use hsdp_kernels::memory::{self, Category, CountingAllocator};
//! use hsdp_sharding::{ByteCount, Rank};
//!
//! #[global_allocator]
//! static ALLOCATOR: CountingAllocator = CountingAllocator;
//!
//! memory::set_rank(Rank::new(3));
//! let shard = {
//!     let _scope = memory::scope(Category::Shard);
//!     vec![0.0_f32; 1000]
//! };
//! assert_eq!(memory::usage(Rank::new(3), Category::Shard).live, ByteCount(4000));
//! drop(shard);
//! assert_eq!(memory::usage(Rank::new(3), Category::Shard).live, ByteCount(0));
//! assert_eq!(memory::usage(Rank::new(3), Category::Shard).peak, ByteCount(4000));
//! ```
//!
//! What is counted:
//! - An allocation belongs to the rank and the category of the thread *at that moment*, and keeps them until it is freed,
//!   by whichever thread; growing it in another scope does not move it.
//! - The bytes asked for are counted, not what the system rounds them up to, nor this module's own header.
//! - Outside of scopes, and in one of [`Category::Other`], nothing is counted, but for [`allocations`]: that is all of the process.
//! - Where the allocator is not installed, a scope is a store to a thread-local and all usages are zero.

mod allocator;
mod scope;
mod tally;

pub use allocator::CountingAllocator;
#[cfg(feature = "cuda")]
pub(crate) use scope::charge_on_device;
pub use scope::{Scope, is_installed, scope, set_rank};
#[cfg(feature = "cuda")]
pub(crate) use tally::DeviceCharge;
#[cfg(feature = "cuda")]
pub use tally::usage_on_device;
pub use tally::{
    Allocations, Category, MAX_RANKS, Usage, allocations, reset_peaks, set_budget, usage,
};

#[cfg(test)]
mod tests;
