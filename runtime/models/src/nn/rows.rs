//! Kernels over rows. They run in parallel, compute in f32 for all element types, and give the same
//! bits for any number of threads.

use std::array;
use std::ops::Range;

use candle_core::{DType, WithDType};
use hsdp_kernels::{Values, ValuesMut, cast, unpack, vectorized};
use parking_lot::Mutex;

use super::element::Element;
use super::parts::in_parallel;

/// Approximate number of elements in a chunk. A thread works longer on it than it takes to fetch
/// it.
const CHUNK: usize = 1 << 14;

/// Maximum number of chunks. Weights have a partial sum for each chunk.
const MOST_CHUNKS: usize = 256;

/// Length of rows for kernels that treat all elements alike. A few such rows fit the first-level
/// cache.
pub(super) const ANY_WIDTH: usize = 1024;

/// Tensors of one shape, as rows of `width` elements. The last row may be shorter.
pub(super) struct Rows<'a, T, const N: usize> {
    pub(super) inputs: [&'a [T]; N],
    pub(super) width: usize,
}

impl<T: Element, const N: usize> Rows<'_, T, N> {
    /// Computes `M` tensors of the shape of the inputs. `row` gets the number of a row, the row of
    /// each input, and the row of each output, which it overwrites.
    pub(super) fn map<const M: usize>(
        &self,
        row: impl Fn(usize, [&[f32]; N], [&mut [f32]; M]) + Sync,
    ) -> [Vec<T>; M] {
        self.fold(|| (), |(), index, inputs, outputs| row(index, inputs, outputs)).0
    }

    /// Computes tensors as [`map`](Self::map) does, with a state that `row` changes. Each chunk of
    /// rows has its own state, which begins as `start`. Returns the states in the order of the
    /// rows. The chunks depend on the shape alone.
    pub(super) fn fold<A: Send, const M: usize>(
        &self,
        start: impl Fn() -> A + Sync,
        row: impl Fn(&mut A, usize, [&[f32]; N], [&mut [f32]; M]) + Sync,
    ) -> ([Vec<T>; M], Vec<A>) {
        let len = self.len();
        let mut outputs = array::from_fn(|_| vec![T::zeroed(); len]);
        let chunks: Vec<_> =
            self.chunks(&mut outputs).into_iter().map(Some).map(Mutex::new).collect();
        let run = |index: usize| {
            let chunk = chunks[index].lock().take().expect("a chunk is run once");
            self.run(chunk, start(), &row)
        };
        let states = match is_parallel(len) {
            true => in_parallel(chunks.len(), run),
            false => (0..chunks.len()).map(run).collect(),
        };
        (outputs, states)
    }

    fn len(&self) -> usize {
        self.inputs.first().map_or(0, |input| input.len())
    }

    fn chunks<'o, const M: usize>(&self, outputs: &'o mut [Vec<T>; M]) -> Vec<Chunk<'o, T, M>> {
        let len = self.len();
        if self.width == 0 {
            return Vec::new();
        }
        let rows = len.div_ceil(self.width);
        let step = self.width * CHUNK.div_ceil(self.width).max(rows.div_ceil(MOST_CHUNKS));
        let mut parts = outputs.each_mut().map(|output| output.chunks_mut(step));
        let starts = (0..len).step_by(step);
        let chunk = |start: usize| Chunk {
            elements: start..len.min(start + step),
            outputs: parts.each_mut().map(|part| part.next().unwrap_or_default()),
        };
        starts.map(chunk).collect()
    }

    fn run<A, const M: usize>(
        &self,
        chunk: Chunk<'_, T, M>,
        mut state: A,
        row: &impl Fn(&mut A, usize, [&[f32]; N], [&mut [f32]; M]),
    ) -> A {
        let Chunk { elements, outputs } = chunk;
        let mut inputs =
            self.inputs.map(|input| Input { values: &input[elements.clone()], wide: self.wide() });
        let mut outputs = outputs.map(|values| Output { values, wide: self.wide() });
        let first = elements.start / self.width;
        for (index, start) in (0..elements.len()).step_by(self.width).enumerate() {
            let range = start..elements.len().min(start + self.width);
            let read = inputs.each_mut().map(|input| input.row(range.clone()));
            let written = outputs.each_mut().map(|output| output.row(range.clone()));
            vectorized(|| row(&mut state, first + index, read, written));
            outputs.iter_mut().for_each(|output| output.round(range.clone()));
        }
        state
    }

    /// Returns a buffer for a row in f32, if the elements are not f32.
    fn wide(&self) -> Vec<f32> {
        vec![0.0; if <T as WithDType>::DTYPE == DType::F32 { 0 } else { self.width }]
    }
}

/// Returns whether threads share the work. In a pool of one thread, ranks that are threads would
/// wait for each other.
fn is_parallel(len: usize) -> bool {
    len >= 2 * CHUNK && rayon::current_num_threads() > 1
}

/// A range of elements, and the same range of each output.
struct Chunk<'a, T, const M: usize> {
    elements: Range<usize>,
    outputs: [&'a mut [T]; M],
}

struct Input<'a, T> {
    values: &'a [T],
    wide: Vec<f32>,
}

impl<T: Element> Input<'_, T> {
    fn row(&mut self, range: Range<usize>) -> &[f32] {
        let wide = &mut self.wide;
        match T::values(&self.values[range]) {
            Values::F32(row) => row,
            row => {
                let wide = &mut wide[..row.len()];
                unpack(wide, row);
                wide
            }
        }
    }
}

struct Output<'a, T> {
    values: &'a mut [T],
    wide: Vec<f32>,
}

impl<T: Element> Output<'_, T> {
    fn row(&mut self, range: Range<usize>) -> &mut [f32] {
        let len = range.len();
        match T::values_mut(&mut self.values[range]) {
            ValuesMut::F32(row) => row,
            _ => &mut self.wide[..len],
        }
    }

    /// Rounds a row that was written in f32, and stores it.
    fn round(&mut self, range: Range<usize>) {
        let len = range.len();
        match T::values_mut(&mut self.values[range]) {
            ValuesMut::F32(_) => {}
            row => cast(row, &self.wide[..len]),
        }
    }
}

/// Sums the chunks' sums for a weight, in the order of the rows.
pub(super) fn in_order(width: usize, partials: impl IntoIterator<Item = Vec<f32>>) -> Vec<f32> {
    partials.into_iter().fold(vec![0.0; width], |mut sum, partial| {
        sum.iter_mut().zip(&partial).for_each(|(sum, partial)| *sum += partial);
        sum
    })
}
