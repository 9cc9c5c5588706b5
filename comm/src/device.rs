//! Collectives on buffers of a device: the calls on whole units, where gradients, partials and parameters lie there.
//!
//! Members meet as for any other operation, with the same descriptors, and in a local world all ranks may use one device. Who comes last
//! issues, for all of them, also by NCCL: so an operation is issued for all members or for none, and in one order for all groups. Each
//! member's part goes on that member's own stream of the channel. So an operation is
//! complete, for [`Pending`](crate::Pending), when it is issued; what it writes carries the moment from which it can be read
//! (`CUDA.md` of the kernels), and nobody waits on the host.
//!
//! In reading order: `units` (what is called), `gather`, `reduce`, `all_reduce` (what is issued), `carrier` (by whom: this
//! process, or NCCL), `outcome` (what members
//! get), `apart` (where members are processes).

mod all_reduce;
mod apart;
mod carrier;
mod gather;
mod outcome;
mod reduce;
mod units;

pub use self::units::{DeviceAccumulator, DeviceReduced};
