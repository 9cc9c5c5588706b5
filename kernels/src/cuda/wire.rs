//! Kernels between gradients, the wire and partials: copies of many gradients into one flat buffer,
//! sums of contributions, casts, and the inspection of elements.

use std::ops::Range;
use std::time::Duration;

use hsdp_sharding::DType;

use super::buffer::{DeviceBuffer, DeviceSlice};
use super::device::CudaKernel;
use super::error::CudaError;
use super::launch::{
    Launch, MOST_MEMBERS, MOST_PARAMS, Notes, Of, Reads, ScaleArgument, Table, TableParam, WIDTH,
    Writes, argument, number, read_words, wire, words,
};
use super::stream::Stream;
use crate::{Divisor, Fold, MatrixDType};

/// A gradient, and the place of its parameter in the flat buffer.
#[derive(Clone, Debug)]
pub struct Packed<'a> {
    /// The gradient, in f32, f16 or bf16.
    pub gradient: DeviceSlice<'a>,
    /// The index of its first element in the flat buffer: a multiple of 4.
    pub start: usize,
}

impl Stream {
    /// Packs gradients for the wire: `flat = round(gradient / pre)` at the places of the gradients,
    /// zeros elsewhere. Quotients are computed in f32 and rounded once to the dtype of `flat`.
    ///
    /// `gradients` are in the order of their starts, and do not overlap. With `notes`, the kernel
    /// notes the least index of `flat` whose element is not finite. One launch packs up to 120
    /// gradients. The bits are those of [`pack`](crate::pack).
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if gradients overlap or are not in order, one reaches beyond the end
    /// or starts at an index that is not a multiple of 4, or a buffer is of another device;
    /// [`CudaError::Driver`] if a call of the driver fails.
    pub fn pack(
        &self,
        flat: &mut DeviceBuffer,
        gradients: &[Packed<'_>],
        pre: Divisor,
        mut notes: Option<Notes<'_>>,
    ) -> Result<(), CudaError> {
        let places = gradients.iter().map(|it| (it.start, it.gradient.len()));
        check_places(flat.len(), places)?;
        let scale = ScaleArgument::from(pre);
        let note = argument(notes.as_ref(), Of::Contribution);
        let kernel = CudaKernel::Pack(wire(flat.dtype()));
        for (run, part) in runs(gradients, flat.len(), |it| it.start) {
            let table = table(part);
            let address = flat.address(0);
            let begin = run.start as u64;
            let end = run.end as u64;
            let launch = Launch::over(kernel, run.len())
                .argument(&table)
                .argument(&address)
                .argument(&begin)
                .argument(&end)
                .argument(&scale)
                .argument(&note);
            let reads: Reads<'_> = part.iter().map(|it| it.gradient.buffer()).collect();
            let noted = notes.as_mut().map(|notes| &mut notes.noted.words);
            let mut writes: Writes<'_> = [&mut *flat].into_iter().chain(noted).collect();
            // SAFETY: CU-5, places lie within the flat buffer and do not overlap, and each is as
            // long as its gradient.
            unsafe { launch.issue(self, &reads, &mut writes) }?;
        }
        Ok(())
    }
}

fn table(gradients: &[Packed<'_>]) -> Table<TableParam, MOST_PARAMS> {
    let entry = |Packed { gradient, start }: &Packed<'_>| TableParam {
        address: gradient.buffer().address(gradient.range().start),
        start: *start as u64,
        len: gradient.len() as u64,
        dtype: number(gradient.dtype()),
        unused: 0,
    };
    Table::of(gradients.iter().map(entry))
}

/// Cuts entries into launches. The elements of a launch begin at its first entry (at 0 for the
/// first launch) and end at the first entry of the next launch.
fn runs<T>(
    entries: &[T],
    len: usize,
    start: impl Fn(&T) -> usize,
) -> impl Iterator<Item = (Range<usize>, &[T])> {
    let launches = entries.len().div_ceil(MOST_PARAMS).max(1);
    (0..launches).map(move |launch| {
        let at = |launch: usize| entries.get(launch * MOST_PARAMS);
        let begin = at(launch).filter(|_| launch > 0).map_or(0, &start);
        let end = at(launch + 1).map_or(len, &start);
        let last = entries.len().min((launch + 1) * MOST_PARAMS);
        (begin..end, &entries[launch * MOST_PARAMS..last])
    })
}

fn check_places(len: usize, places: impl Iterator<Item = (usize, usize)>) -> Result<(), CudaError> {
    let mut end = 0;
    for (index, (start, count)) in places.enumerate() {
        let problem = if !start.is_multiple_of(WIDTH) {
            "does not start at a multiple of 4"
        } else if start < end {
            "starts before the end of the entry before"
        } else if count > len || start > len - count {
            "reaches beyond the end"
        } else {
            end = start + count;
            continue;
        };
        let beyond = start.saturating_add(count);
        let problem = format!("entry {index} (elements {start}..{beyond} of {len}) {problem}");
        return Err(CudaError::Mismatch { operation: "pack", problem });
    }
    Ok(())
}

impl Stream {
    /// Sums the contributions of members, in their order and in f32, and takes the sum into a
    /// target: `target = sum / post` or `target += sum / post`.
    ///
    /// `wires` has one buffer per member, all of one dtype; the elements `range` of each are
    /// summed. `range` starts at a multiple of 4. `target` is `[range.len()]`, f32. With `notes`,
    /// the kernel notes the least index of the target whose element is not finite.
    ///
    /// The call makes one launch. The bits are those of
    /// [`sum_contributions`](crate::sum_contributions) on a wire that rounds nothing.
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if there are no members or more than 480, a buffer has the wrong
    /// dtype or length or is of another device, or `range` starts at an index that is not a
    /// multiple of 4; [`CudaError::Driver`] if a call of the driver fails.
    pub fn sum(
        &self,
        target: &mut DeviceBuffer,
        wires: &[&DeviceBuffer],
        range: Range<usize>,
        post: Divisor,
        fold: Fold,
        notes: Option<Notes<'_>>,
    ) -> Result<(), CudaError> {
        target.check("sum", DType::F32, range.len())?;
        check_members(wires, &range)?;
        let addresses = wires.iter().map(|wire| wire.address(range.start));
        let members = Table::<u64, MOST_MEMBERS>::of(addresses);
        let address = target.address(0);
        let len = range.len() as u64;
        let note = argument(notes.as_ref(), Of::Sum);
        let scale = ScaleArgument::from(post);
        let fold = u32::from(fold == Fold::Add);
        let kernel = CudaKernel::Sum(wire(wires[0].dtype()));
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
        unsafe { launch.issue(self, wires, &mut writes) }
    }

    /// Casts f32 to the dtype of the target: `target = round(source / pre)`, divided in f32 and
    /// rounded once.
    ///
    /// The call makes one launch. The bits are those of [`pack`](crate::pack).
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if the buffers differ in length, the source is not f32, or a buffer
    /// is of another device; [`CudaError::Driver`] if a call of the driver fails.
    pub fn narrow(
        &self,
        target: &mut DeviceBuffer,
        source: &DeviceBuffer,
        pre: Divisor,
    ) -> Result<(), CudaError> {
        source.check("narrow", DType::F32, target.len())?;
        self.launch_narrow(target, 0, source, 0..source.len(), pre)
    }

    /// Casts the elements `from` of an f32 buffer to the dtype of the target, to its elements `to`,
    /// rounded once. Both ranges begin at multiples of 8.
    ///
    /// The call makes one launch. The bits are those of [`cast`](crate::cast).
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if the ranges differ in length, reach beyond their buffers, end
    /// before they start or begin elsewhere, the source is not f32, or a buffer is of another
    /// device; [`CudaError::Driver`] if a call of the driver fails.
    pub fn narrow_part(
        &self,
        target: &mut DeviceBuffer,
        to: Range<usize>,
        source: &DeviceBuffer,
        from: Range<usize>,
    ) -> Result<(), CudaError> {
        let operation = "narrow";
        source.check(operation, DType::F32, source.len())?;
        let ranges = [(&to, target.len()), (&from, source.len())];
        let fits = |(range, len): (&Range<usize>, usize)| {
            range.start <= range.end && range.end <= len && range.start.is_multiple_of(8)
        };
        if to.len() != from.len() || !ranges.into_iter().all(fits) {
            let lens = [source.len(), target.len()];
            let problem = format!("elements {from:?} cannot go to {to:?} in buffers of {lens:?}");
            return Err(CudaError::Mismatch { operation, problem });
        }
        self.launch_narrow(target, to.start, source, from, Divisor::ONE)
    }

    /// Launches the cast of elements that lie in their buffers.
    fn launch_narrow(
        &self,
        target: &mut DeviceBuffer,
        start: usize,
        source: &DeviceBuffer,
        from: Range<usize>,
        pre: Divisor,
    ) -> Result<(), CudaError> {
        let kernel = CudaKernel::Narrow(wire(target.dtype()));
        let to = target.address(start);
        let elements = source.address(from.start);
        let len = from.len() as u64;
        let scale = ScaleArgument::from(pre);
        let launch = Launch::over(kernel, from.len())
            .argument(&to)
            .argument(&elements)
            .argument(&len)
            .argument(&scale);
        // SAFETY: CU-5, both have so many elements from these on.
        unsafe { launch.issue(self, &[source], &mut [target]) }
    }

    /// Casts the first elements of a bf16 buffer to f32, into `range` of the target.
    pub(super) fn widen(
        &self,
        target: &mut DeviceBuffer,
        range: Range<usize>,
        source: &DeviceBuffer,
    ) -> Result<(), CudaError> {
        let to = target.address(range.start);
        let from = source.address(0);
        let len = range.len() as u64;
        let launch = Launch::over(CudaKernel::Widen, range.len())
            .argument(&to)
            .argument(&from)
            .argument(&len);
        // SAFETY: CU-5, the range lies in its buffer of f32, and the source is bf16 and not
        // shorter.
        unsafe { launch.issue(self, &[source], &mut [target]) }
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
            let len = wire.len();
            let dtype = wire.dtype();
            let end = range.end;
            return refuse(format!(
                "member {member} has {len} elements of {dtype}, but {end} of {} are expected",
                wires[0].dtype()
            ));
        }
    }
    Ok(())
}

/// The largest number of blocks, and the number of threads, of `inspect.cu`. They are the same on
/// all devices, so that sums have one order.
const BLOCKS: u32 = 512;
const THREADS: u32 = 256;

/// The number of 8-byte words in the result of one block.
const SEEN: usize = 2;

/// The number of f32 that have room for the results of all blocks.
pub(super) const PARTIAL: usize = 2 * SEEN * BLOCKS as usize;

/// The result of an inspection of a part of a buffer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seen {
    /// The sum of the squares of its elements, in f64.
    pub squared_norm: f64,
    /// The index in the buffer of the first element of the part that is infinite or NaN; `None` if
    /// all are finite.
    pub first_non_finite: Option<u64>,
}

impl Stream {
    /// Computes the squared norm of a range of each of these f32 buffers and finds its first
    /// element that is not finite, in one pass over each. Makes two launches per buffer, and waits
    /// for the results for at most `patience`. The order of additions is the same on all devices,
    /// and differs from that of [`squared_norm`](crate::squared_norm).
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if a buffer is not f32 or is of another device, or a range does not
    /// begin at a multiple of four elements or reaches beyond its buffer; [`CudaError::Late`]
    /// if the results are not there after `patience`; [`CudaError::OutOfMemory`] if the device has
    /// no memory for them; [`CudaError::Driver`] if a call of the driver fails, or an operation
    /// before has failed.
    pub fn inspect(
        &self,
        all: &[(&DeviceBuffer, Range<usize>)],
        patience: Duration,
    ) -> Result<Vec<Seen>, CudaError> {
        let mut seen = words(self, SEEN * all.len(), "results of an inspection")?;
        for (index, (values, range)) in all.iter().enumerate() {
            self.inspect_one(values, range.clone(), &mut seen, SEEN * index)?;
        }
        let seen_of = |([squares, first], (_, range)): (&[u64; SEEN], &(_, Range<usize>))| Seen {
            squared_norm: f64::from_bits(*squares),
            first_non_finite: (*first != u64::MAX).then(|| range.start as u64 + *first),
        };
        let words = read_words(self, &seen, patience)?;
        Ok(words.as_chunks().0.iter().zip(all).map(seen_of).collect())
    }

    /// Inspects a range of a buffer, and writes the result to `seen` from word `at` on.
    fn inspect_one(
        &self,
        values: &DeviceBuffer,
        range: Range<usize>,
        seen: &mut DeviceBuffer,
        at: usize,
    ) -> Result<(), CudaError> {
        values.check("inspect", DType::F32, values.len())?;
        let fits = range.start <= range.end && range.end <= values.len();
        if !fits || !range.start.is_multiple_of(WIDTH) {
            let problem = format!("elements {range:?} of {}", values.len());
            return Err(CudaError::Mismatch { operation: "inspect", problem });
        }
        let mut blocks = words(self, SEEN * BLOCKS as usize, "partial results of an inspection")?;
        let count = self.inspect_parts(MatrixDType::F32, values, range, &mut blocks)?;
        let from = blocks.address(0);
        let to = seen.address(2 * at);
        let launch = Launch::fixed(CudaKernel::InspectBlocks, 1, BLOCKS);
        let launch = launch.argument(&from).argument(&count).argument(&to);
        // SAFETY: CU-5, one `Seen` a block is read, and one written.
        unsafe { launch.issue(self, &[&blocks], &mut [seen]) }
    }

    /// Computes the squared norm of a range of an f32 buffer, whose elements are rounded to `dtype`
    /// first. The result is a `Seen` at the beginning of `squares`, which has [`PARTIAL`] f32.
    /// Makes two launches.
    pub(super) fn squares(
        &self,
        dtype: MatrixDType,
        values: &DeviceBuffer,
        range: Range<usize>,
        squares: &mut DeviceBuffer,
    ) -> Result<(), CudaError> {
        let count = self.inspect_parts(dtype, values, range, squares)?;
        let address = squares.address(0);
        let launch = Launch::fixed(CudaKernel::InspectBlocks, 1, BLOCKS);
        let launch = launch.argument(&address).argument(&count).argument(&address);
        // SAFETY: CU-5, one `Seen` a block is read, and one written after that.
        unsafe { launch.issue(self, &[], &mut [squares]) }
    }

    /// Writes one `Seen` a block to `blocks`, and returns their number.
    fn inspect_parts(
        &self,
        dtype: MatrixDType,
        values: &DeviceBuffer,
        range: Range<usize>,
        blocks: &mut DeviceBuffer,
    ) -> Result<u64, CudaError> {
        let from = values.address(range.start);
        let to = blocks.address(0);
        let len = range.len() as u64;
        let wanted = range.len().div_ceil(WIDTH * THREADS as usize);
        let count = u32::try_from(wanted).unwrap_or(BLOCKS).clamp(1, BLOCKS);
        let launch = Launch::fixed(CudaKernel::Inspect(dtype), count, THREADS);
        let launch = launch.argument(&from).argument(&len).argument(&to);
        // SAFETY: CU-5, so many elements are read, and one `Seen` a block is written.
        unsafe { launch.issue(self, &[values], &mut [blocks]) }?;
        Ok(u64::from(count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_cover_all_elements_once_and_keep_entries_whole() {
        let starts: Vec<usize> = (0..300).map(|index| 64 + index * 32).collect();
        let runs: Vec<_> = runs(&starts, 20_000, |start| *start).collect();
        let ranges: Vec<_> = runs.iter().map(|(range, _)| range.clone()).collect();
        assert_eq!(ranges, [0..64 + 120 * 32, 64 + 120 * 32..64 + 240 * 32, 64 + 240 * 32..20_000]);
        assert_eq!(runs.iter().map(|(_, part)| part.len()).collect::<Vec<_>>(), [120, 120, 60]);
    }

    #[test]
    fn nothing_to_pack_is_zeros_all_the_same() {
        let runs: Vec<_> = runs(&[], 96, |start: &usize| *start).collect();
        assert_eq!(runs, [(0..96, &[][..])]);
    }

    #[test]
    fn places_that_do_not_fit_are_named() {
        let check = |places: &[(usize, usize)]| check_places(100, places.iter().copied());
        assert_eq!(check(&[(0, 30), (32, 64)]), Ok(()));
        for (places, expected) in [
            (
                vec![(0, 30), (22, 4)],
                "entry 1 (elements 22..26 of 100) does not start at a multiple of 4",
            ),
            (
                vec![(0, 30), (24, 4)],
                "entry 1 (elements 24..28 of 100) starts before the end of the entry before",
            ),
            (vec![(96, 5)], "entry 0 (elements 96..101 of 100) reaches beyond the end"),
        ] {
            let said = check(&places).expect_err("it does not fit").to_string();
            assert_eq!(said, format!("pack: {expected}"));
        }
    }
}
