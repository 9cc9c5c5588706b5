//! Kernels over rows. They run in parallel, compute in f32 for all element types, and give the same
//! bits for any number of threads.
//!
//! Sums and maxima over a row are in an order that the compiler can vectorize: sixteen lanes that
//! are combined at the end.

use std::array;
use std::ops::Range;

use hsdp_kernels::{FreshPart, FreshVec, Values, ValuesMut, cast, unpack, vectorized};
use parking_lot::Mutex;
use rayon::prelude::*;

use super::element::LayerElement;

/// Approximate number of elements in a chunk. A thread works longer on it than it takes to fetch
/// it.
const CHUNK: usize = 1 << 14;

/// Maximum number of chunks. Weights have a partial sum for each chunk.
const MOST_CHUNKS: usize = 256;

/// Length of rows for kernels that treat all elements alike. A few such rows fit the first-level
/// cache.
pub(super) const ANY_WIDTH: usize = 1024;

/// Tensors of one shape, as rows of `width` elements. The last row may be shorter.
pub(super) struct Rows<'a, const N: usize> {
    pub(super) inputs: [Values<'a>; N],
    pub(super) width: usize,
}

impl<const N: usize> Rows<'_, N> {
    /// Computes `M` tensors of the shape of the inputs. `row` gets the number of a row, the row of
    /// each input, and the row of each output. It must write each element: the row of a 16-bit
    /// output has elements of an earlier row.
    pub(super) fn map<T: LayerElement, const M: usize>(
        &self,
        row: impl Fn(usize, [&[f32]; N], [&mut [f32]; M]) + Sync,
    ) -> [Vec<T>; M] {
        self.fold(|| (), |(), index, inputs, outputs| row(index, inputs, outputs)).0
    }

    /// Computes tensors as [`map`](Self::map) does, with a state that `row` changes. Each chunk of
    /// rows has its own state, which begins as `start`. Returns the states in the order of the
    /// rows. The chunks depend on the shape alone.
    pub(super) fn fold<T: LayerElement, A: Send, const M: usize>(
        &self,
        start: impl Fn() -> A + Sync,
        row: impl Fn(&mut A, usize, [&[f32]; N], [&mut [f32]; M]) + Sync,
    ) -> ([Vec<T>; M], Vec<A>) {
        let len = self.len();
        let mut outputs = array::from_fn(|_| FreshVec::new(len));
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
        (outputs.map(FreshVec::into_vec), states)
    }

    fn len(&self) -> usize {
        self.inputs.first().map_or(0, |input| input.len())
    }

    fn chunks<'o, T: LayerElement, const M: usize>(
        &self,
        outputs: &'o mut [FreshVec<T>; M],
    ) -> Vec<RowChunk<'o, T, M>> {
        let len = self.len();
        if self.width == 0 {
            return Vec::new();
        }
        let rows = len.div_ceil(self.width);
        let step = self.width * CHUNK.div_ceil(self.width).max(rows.div_ceil(MOST_CHUNKS));
        let mut parts = outputs.each_mut().map(|output| output.parts(step));
        let starts = (0..len).step_by(step);
        let chunk = |start: usize| RowChunk {
            elements: start..len.min(start + step),
            outputs: parts.each_mut().map(|part| part.next().expect("a part for each chunk")),
        };
        starts.map(chunk).collect()
    }

    fn run<T: LayerElement, A, const M: usize>(
        &self,
        chunk: RowChunk<'_, T, M>,
        mut state: A,
        row: &impl Fn(&mut A, usize, [&[f32]; N], [&mut [f32]; M]),
    ) -> A {
        let RowChunk { elements, outputs } = chunk;
        let parts = self.inputs.map(|values| values.slice(elements.clone()));
        let mut inputs = parts.map(|values| RowInput::new(values, self.width));
        let mut outputs = outputs.map(|part| RowOutput { part, wide: Vec::new() });
        let first = elements.start / self.width;
        for (index, start) in (0..elements.len()).step_by(self.width).enumerate() {
            let range = start..elements.len().min(start + self.width);
            let read = inputs.each_mut().map(|input| input.row(range.clone()));
            let mut rows = outputs.each_mut().map(|output| output.row(range.len()));
            let written = rows.each_mut().map(OutputRow::wide);
            vectorized(|| row(&mut state, first + index, read, written));
            rows.into_iter().for_each(OutputRow::round);
        }
        state
    }
}

/// Returns whether threads share the work. In a pool of one thread, ranks that are threads would
/// wait for each other.
fn is_parallel(len: usize) -> bool {
    len >= 2 * CHUNK && rayon::current_num_threads() > 1
}

/// A range of elements, and the same range of each output.
struct RowChunk<'a, T, const M: usize> {
    elements: Range<usize>,
    outputs: [FreshPart<'a, T>; M],
}

struct RowInput<'a> {
    values: Values<'a>,
    /// Row in f32, if the elements are not f32.
    wide: Vec<f32>,
}

impl<'a> RowInput<'a> {
    fn new(values: Values<'a>, width: usize) -> Self {
        let is_wide = matches!(values, Values::F32(_));
        Self { values, wide: vec![0.0; if is_wide { 0 } else { width }] }
    }

    fn row(&mut self, range: Range<usize>) -> &[f32] {
        let wide = &mut self.wide;
        match self.values.slice(range) {
            Values::F32(row) => row,
            row => {
                let wide = &mut wide[..row.len()];
                unpack(wide, row);
                wide
            }
        }
    }
}

struct RowOutput<'a, T> {
    part: FreshPart<'a, T>,
    /// Row in f32, if the elements are not f32.
    wide: Vec<f32>,
}

impl<T: LayerElement> RowOutput<'_, T> {
    /// Takes the next row. In 16 bits it has the elements of an earlier row.
    fn row(&mut self, len: usize) -> OutputRow<'_> {
        match T::values_mut(self.part.take(len)) {
            ValuesMut::F32(row) => OutputRow::Wide(row),
            row => {
                self.wide.resize(len, 0.0);
                OutputRow::Rounded { row, wide: &mut self.wide }
            }
        }
    }
}

/// A row of an output.
enum OutputRow<'a> {
    /// Elements in f32.
    Wide(&'a mut [f32]),
    /// Elements of 16 bits, and the row in f32 that is rounded to them.
    Rounded { row: ValuesMut<'a>, wide: &'a mut [f32] },
}

impl OutputRow<'_> {
    fn wide(&mut self) -> &mut [f32] {
        match self {
            Self::Wide(row) => row,
            Self::Rounded { wide, .. } => wide,
        }
    }

    /// Rounds a row that was written in f32, and stores it.
    fn round(self) {
        if let Self::Rounded { row, wide } = self {
            cast(row, wide);
        }
    }
}

/// Returns elements rounded from f32.
pub(super) fn narrowed<T: LayerElement>(wide: &[f32]) -> Vec<T> {
    let mut narrow = FreshVec::new(wide.len());
    let parts = narrow.parts(CHUNK).zip(wide.chunks(CHUNK));
    let round = |(mut part, wide): (FreshPart<'_, T>, &[f32])| {
        for wide in wide.chunks(ANY_WIDTH) {
            cast(T::values_mut(part.take(wide.len())), wide);
        }
    };
    if is_parallel(wide.len()) {
        let parts: Vec<_> = parts.map(Some).map(Mutex::new).collect();
        each(parts.len(), &|index| parts[index].lock().take().into_iter().for_each(round));
    } else {
        parts.for_each(round);
    }
    narrow.into_vec()
}

/// Sums the chunks' sums for a weight, in the order of the rows.
pub(super) fn in_order(width: usize, partials: impl IntoIterator<Item = Vec<f32>>) -> Vec<f32> {
    partials.into_iter().fold(vec![0.0; width], |mut sum, partial| {
        sum.iter_mut().zip(&partial).for_each(|(sum, partial)| *sum += partial);
        sum
    })
}

/// Returns the result of each of `count` parts, in order.
pub(super) fn in_parallel<R: Send>(count: usize, part: impl Fn(usize) -> R + Sync) -> Vec<R> {
    let results: Vec<Mutex<Option<R>>> = (0..count).map(|_| Mutex::new(None)).collect();
    each(count, &|index| *results[index].lock() = Some(part(index)));
    let result = |result: Mutex<Option<R>>| result.into_inner().expect("each part is computed");
    results.into_iter().map(result).collect()
}

/// Runs all parts. It is not generic, so that rayon is compiled once, not for each kernel and each
/// element type.
fn each(count: usize, part: &(dyn Fn(usize) + Sync)) {
    (0..count).into_par_iter().for_each(part);
}

const LANES: usize = 16;

/// Sums `term` over a row.
#[inline(always)]
pub(super) fn sum(row: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    total(over(row, [0.0; LANES], |sum, x| sum + term(x)))
}

/// Sums `term` over two rows of one length.
#[inline(always)]
pub(super) fn sum_of_pairs(a: &[f32], b: &[f32], term: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let mut a = a.chunks_exact(LANES);
    let mut b = b.chunks_exact(LANES);
    for (a, b) in a.by_ref().zip(b.by_ref()) {
        for (lane, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += term(*a, *b);
        }
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(a.remainder().iter().zip(b.remainder())) {
        *lane += term(*a, *b);
    }
    total(lanes)
}

/// Returns the largest element that is not NaN, or minus infinity if there is none.
#[inline(always)]
pub(super) fn max(row: &[f32]) -> f32 {
    let larger = |most: f32, x: f32| if x > most { x } else { most };
    let lanes = over(row, [f32::NEG_INFINITY; LANES], larger);
    lanes.into_iter().fold(f32::NEG_INFINITY, larger)
}

#[inline(always)]
fn over(row: &[f32], mut lanes: [f32; LANES], fold: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    let mut chunks = row.chunks_exact(LANES);
    for chunk in chunks.by_ref() {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane = fold(*lane, *x);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane = fold(*lane, *x);
    }
    lanes
}

#[inline(always)]
fn total(lanes: [f32; LANES]) -> f32 {
    let mut lanes = lanes;
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}
