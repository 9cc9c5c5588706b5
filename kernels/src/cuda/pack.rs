//! Copies of many parameters to and from one flat buffer.

use std::ops::Range;

use smallvec::SmallVec;

use super::buffer::DeviceBuffer;
use super::error::CudaError;
use super::kernel::Kernel;
use super::launch::{Launch, Reads, Scale, WIDTH, Writes};
use super::noted::{Notes, Of, argument};
use super::slice::DeviceSlice;
use super::stream::Stream;
use super::table::{MOST_PARAMS, Param, Table, number, wire};
use crate::Divisor;

/// A gradient, and the place of its parameter in the flat buffer.
#[derive(Clone, Debug)]
pub struct Packed<'a> {
    /// The gradient, in f32, f16 or bf16.
    pub gradient: DeviceSlice<'a>,
    /// The index of its first element in the flat buffer: a multiple of 4.
    pub start: usize,
}

/// A parameter that is copied out of the flat buffer.
#[derive(Debug)]
pub struct Unpacked<'a> {
    /// The buffer of the parameter, in f32, f16 or bf16.
    pub parameter: &'a mut DeviceBuffer,
    /// The index of its first element in the flat buffer: a multiple of 4.
    pub start: usize,
}

impl Stream {
    /// Packs gradients for the wire: `flat = round(gradient / pre)` at the places of the gradients, zeros elsewhere. Quotients are
    /// computed in f32 and rounded once to the dtype of `flat`.
    ///
    /// `gradients` are in the order of their starts, and do not overlap. With `notes`, the kernel notes the least index of `flat`
    /// whose element is not finite. One launch packs up to 120 gradients. The bits are those of [`pack`](crate::pack).
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if gradients overlap or are not in order, one reaches beyond the end or starts at an index that is not
    /// a multiple of 4, or a buffer is of another device; [`CudaError::Driver`] if a call of the driver fails.
    pub fn pack(
        &self,
        flat: &mut DeviceBuffer,
        gradients: &[Packed<'_>],
        pre: Divisor,
        mut notes: Option<Notes<'_>>,
    ) -> Result<(), CudaError> {
        let places = gradients.iter().map(|it| (it.start, it.gradient.len()));
        check_places("pack", flat.len(), places)?;
        let (scale, note) = (Scale::from(pre), argument(notes.as_ref(), Of::Contribution));
        let kernel = Kernel::Pack(wire(flat.dtype()));
        for (run, part) in runs(gradients, flat.len(), |it| it.start) {
            let table = table(part.iter().map(|it| (it.gradient.clone(), it.start)));
            let (address, begin, end) = (flat.address(0), run.start as u64, run.end as u64);
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
            // SAFETY: CU-5, places lie within the flat buffer and do not overlap, and each is as long as its gradient.
            unsafe { launch.issue(self, (&reads, &mut writes)) }?;
        }
        Ok(())
    }

    /// Copies parameters out of a flat buffer, each cast to the dtype of its own buffer. This is the inverse of [`pack`](Self::pack),
    /// with the same conditions on order and starts. One launch copies up to 120 parameters.
    ///
    /// # Errors
    /// The errors of [`pack`](Self::pack).
    pub fn unpack(
        &self,
        flat: &DeviceBuffer,
        parameters: &mut [Unpacked<'_>],
    ) -> Result<(), CudaError> {
        let places = parameters.iter().map(|it| (it.start, it.parameter.len()));
        check_places("unpack", flat.len(), places)?;
        let kernel = Kernel::Unpack(wire(flat.dtype()));
        for part in parameters.chunks_mut(MOST_PARAMS) {
            let begin = part.first().map_or(0, |it| it.start);
            let end = part.last().map_or(0, |it| it.start + it.parameter.len());
            let table = table(part.iter().map(|it| (DeviceSlice::from(&*it.parameter), it.start)));
            let (address, from, to) = (flat.address(0), begin as u64, end as u64);
            let launch = Launch::over(kernel, end - begin)
                .argument(&table)
                .argument(&address)
                .argument(&from)
                .argument(&to);
            let mut writes: SmallVec<[&mut DeviceBuffer; 16]> =
                part.iter_mut().map(|it| &mut *it.parameter).collect();
            // SAFETY: CU-5, places lie within the flat buffer, and each is as long as its parameter.
            unsafe { launch.issue(self, (&[flat], &mut writes)) }?;
        }
        Ok(())
    }

    /// Casts the first elements of `flat` to those of `range`.
    pub(super) fn widen(
        &self,
        (to, range): (&mut DeviceBuffer, Range<usize>),
        flat: &DeviceBuffer,
    ) -> Result<(), CudaError> {
        let (address, begin, end) = (flat.address(0), 0_u64, range.len() as u64);
        let launch = Launch::over(Kernel::Unpack(wire(flat.dtype())), range.len());
        let table = table([(DeviceSlice::new(to, range), 0)].into_iter());
        let launch = launch.argument(&table).argument(&address).argument(&begin).argument(&end);
        // SAFETY: CU-5, the range lies in its buffer, and `flat` is not shorter.
        unsafe { launch.issue(self, (&[flat], &mut [to])) }
    }
}

fn table<'a>(params: impl Iterator<Item = (DeviceSlice<'a>, usize)>) -> Table<Param, MOST_PARAMS> {
    let entry = |(slice, start): (DeviceSlice<'_>, usize)| Param {
        address: slice.buffer().address(slice.range().start),
        start: start as u64,
        len: slice.len() as u64,
        dtype: number(slice.dtype()),
        unused: 0,
    };
    Table::of(params.map(entry))
}

/// Cuts entries into launches. The elements of a launch begin at its first entry (at 0 for the first launch) and end at the first
/// entry of the next launch.
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

fn check_places(
    operation: &'static str,
    len: usize,
    places: impl Iterator<Item = (usize, usize)>,
) -> Result<(), CudaError> {
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
        return Err(CudaError::Mismatch { operation, problem });
    }
    Ok(())
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
        let check = |places: &[(usize, usize)]| check_places("pack", 100, places.iter().copied());
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
