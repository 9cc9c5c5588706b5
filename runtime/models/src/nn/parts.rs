//! Independent parts of a kernel, shared among threads.

use parking_lot::Mutex;
use rayon::prelude::*;

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
