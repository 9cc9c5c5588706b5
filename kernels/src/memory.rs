//! The memory that each rank holds, by category, measured by the global allocator.
//!
//! A plan predicts peaks, and this module measures them independently of the plan. A program (a
//! test, an example) installs [`CountingAllocator`]. Code that allocates memory to be counted opens
//! a [`scope`] around the allocation:
//!
//! ```
//! use hsdp_kernels::memory::{self, Category, CountingAllocator};
//! use hsdp_sharding::{ByteCount, Rank};
//!
//! #[global_allocator]
//! static ALLOCATOR: CountingAllocator = CountingAllocator::new();
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
//! The rules of counting:
//! - An allocation belongs to the rank and the category of the thread *at that moment*, and keeps
//!   them until any thread frees it. Growing it in another scope does not move it.
//! - The requested bytes are counted. The bytes to which the system rounds them up, and this
//!   module's own header, are not.
//! - Outside of scopes, and in a scope of [`Category::Other`], only [`allocations`] counts, which
//!   covers the whole process.
//! - If the allocator is not installed, a scope is a store to a thread-local and all usages are
//!   zero.

mod allocator;
mod scope;
mod tally;

pub use allocator::CountingAllocator;
pub(crate) use scope::charge_on_device;
pub use scope::{Scope, scope, set_rank};
pub(crate) use tally::DeviceCharge;
pub use tally::{
    Allocations, Category, MAX_RANKS, Usage, allocations, reset_peaks, set_budget, usage,
    usage_on_device,
};

#[cfg(test)]
mod tests;
