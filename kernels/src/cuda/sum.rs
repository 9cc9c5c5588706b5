//! Sums of members' contributions, and casts.

use std::ops::Range;

use hsdp_sharding::DType;

use super::buffer::DeviceBuffer;
use super::error::CudaError;
use super::kernel::Kernel;
use super::launch::{Launch, Scale, WIDTH, Writes};
use super::noted::{Notes, Of, argument};
use super::stream::Stream;
use super::table::{MOST_MEMBERS, Table, wire};
use crate::{Divisor, Fold};

impl Stream {
    /// Sums the contributions of members, in their order and in f32, and takes the sum into a target: `target = sum / post` or
    /// `target += sum / post`.
    ///
    /// `wires` has one buffer per member, all of one dtype; the elements `range` of each are summed. `range` starts at a multiple of 4.
    /// `target` is `[range.len()]`, f32. With `notes`, the kernel notes the least index of the target whose element is not finite.
    ///
    /// The call makes one launch. The bits are those of [`sum_contributions`](crate::sum_contributions) on a wire that rounds nothing.
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if there are no members or more than 480, a buffer has the wrong dtype or length or is of another device,
    /// or `range` starts at an index that is not a multiple of 4; [`CudaError::Driver`] if a call of the driver fails.
    pub fn sum(
        &self,
        target: &mut DeviceBuffer,
        (wires, range): (&[&DeviceBuffer], Range<usize>),
        (post, fold): (Divisor, Fold),
        notes: Option<Notes<'_>>,
    ) -> Result<(), CudaError> {
        target.check("sum", DType::F32, range.len())?;
        check_members(wires, &range)?;
        let addresses = wires.iter().map(|wire| wire.address(range.start));
        let members = Table::<u64, MOST_MEMBERS>::of(addresses);
        let (address, len) = (target.address(0), range.len() as u64);
        let note = argument(notes.as_ref(), Of::Sum);
        let (scale, fold) = (Scale::from(post), u32::from(fold == Fold::Add));
        let kernel = Kernel::Sum(wire(wires[0].dtype()));
        let launch = Launch::over(kernel, range.len())
            .argument(&members)
            .argument(&address)
            .argument(&len)
            .argument(&scale)
            .argument(&fold)
            .argument(&note);
        let noted = notes.map(|notes| &mut notes.noted.words);
        let mut writes: Writes<'_> = [target].into_iter().chain(noted).collect();
        // SAFETY: CU-5, each wire has the range, and the target is as long.
        unsafe { launch.issue(self, (wires, &mut writes)) }
    }

    /// Casts f32 to the dtype of the target: `target = round(source / pre)`, divided in f32 and rounded once.
    ///
    /// The call makes one launch. The bits are those of [`pack`](crate::pack).
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if the buffers differ in length, the source is not f32, or a buffer is of another device;
    /// [`CudaError::Driver`] if a call of the driver fails.
    pub fn narrow(
        &self,
        target: &mut DeviceBuffer,
        source: &DeviceBuffer,
        pre: Divisor,
    ) -> Result<(), CudaError> {
        source.check("narrow", DType::F32, target.len())?;
        let kernel = Kernel::Narrow(wire(target.dtype()));
        let (to, from, len) = (target.address(0), source.address(0), target.len() as u64);
        let scale = Scale::from(pre);
        let launch = Launch::over(kernel, target.len())
            .argument(&to)
            .argument(&from)
            .argument(&len)
            .argument(&scale);
        // SAFETY: CU-5, both have so many elements.
        unsafe { launch.issue(self, (&[source], &mut [target])) }
    }
}

fn check_members(wires: &[&DeviceBuffer], range: &Range<usize>) -> Result<(), CudaError> {
    let refuse = |problem| Err(CudaError::Mismatch { operation: "sum", problem });
    if wires.is_empty() || wires.len() > MOST_MEMBERS {
        return refuse(format!("{} members, but 1 to {MOST_MEMBERS} are expected", wires.len()));
    }
    if range.start > range.end {
        return refuse(format!("the range {range:?} ends before it starts"));
    }
    if !range.start.is_multiple_of(WIDTH) {
        return refuse(format!("the range {range:?} does not start at a multiple of 4"));
    }
    for (member, wire) in wires.iter().enumerate() {
        if wire.len() < range.end || wire.dtype() != wires[0].dtype() {
            let (len, dtype) = (wire.len(), wire.dtype());
            let end = range.end;
            return refuse(format!(
                "member {member} has {len} elements of {dtype}, but {end} of {} are expected",
                wires[0].dtype()
            ));
        }
    }
    Ok(())
}
