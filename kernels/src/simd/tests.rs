//! Lets the tests of every kernel run it in all compilations.

use std::cell::Cell;

/// The number of f32 in the vectors of each compilation.
const WIDTHS: [usize; 3] = [16, 8, 4];

thread_local! {
    static WIDEST: Cell<usize> = const { Cell::new(WIDTHS[0]) };
}

/// Returns the number of f32 in the widest vectors that this thread may use.
#[cfg(target_arch = "x86_64")]
pub(super) fn widest() -> usize {
    WIDEST.get()
}

/// Runs `body` with the vectors of this machine, with those of AVX2 and with those of every
/// machine, and checks that the results agree.
///
/// Results are compared as `PartialEq` compares them: return bits where NaN may occur.
pub(crate) fn on_all_widths<R: PartialEq + std::fmt::Debug>(body: impl Fn() -> R) -> R {
    let [wide, others @ ..] = WIDTHS.map(|width| up_to_width(width, &body));
    for (width, narrow) in WIDTHS[1..].iter().zip(others) {
        assert_eq!(wide, narrow, "vectors of this machine and of {width} f32 differ");
    }
    wide
}

/// Runs `body` with vectors of at most `width` f32.
pub(crate) fn up_to_width<R>(width: usize, body: impl FnOnce() -> R) -> R {
    WIDEST.set(width);
    let result = body();
    WIDEST.set(WIDTHS[0]);
    result
}
