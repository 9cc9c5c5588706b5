//! Lets the tests of every kernel run it in both compilations.

use std::cell::Cell;

thread_local! {
    static NARROW: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread asked for narrow vectors.
#[cfg(target_arch = "x86_64")]
pub(super) fn narrow() -> bool {
    NARROW.get()
}

/// Runs `body` with the vectors of this machine and with those of every machine, and checks that
/// the results agree.
///
/// Results are compared as `PartialEq` compares them: return bits where NaN may occur.
pub(crate) fn on_both<R: PartialEq + std::fmt::Debug>(body: impl Fn() -> R) -> R {
    let wide = body();
    NARROW.set(true);
    let narrow = body();
    NARROW.set(false);
    assert_eq!(wide, narrow, "wide and narrow vectors differ");
    wide
}
