//! Collectives on buffers of a device: the calls on whole units, where gradients, partials and parameters lie there.
//!
//! Where ranks are threads, members meet as for any other operation, with the same descriptors, and all ranks may use one device. The member that comes
//! last issues for all of them, also by NCCL: so an operation is issued for all members or for none, and in one order for all groups. Where
//! ranks are processes, each member issues its own part by NCCL, in its call (`NCCL.md`, "Between processes"). Each
//! member's part goes on that member's own streams. So an operation is
//! complete, for [`Pending`](crate::Pending), when it is issued; what it writes carries the moment from which it can be read
//! (`CUDA.md` of the kernels), and no thread of the host waits.
//!
//! In reading order: `units` (the calls), `member` (what a member brings and gets), `work` (what is issued).

mod member;
mod units;
mod work;

pub use self::units::{DeviceAccumulator, DeviceReduced};
