//! Shards of several members, put together where they lie side by side in a parameter.

use std::ops::Range;

use hsdp_kernels::{Values, ValuesMut};
use smallvec::SmallVec;

/// Of which parameter, the elements, and which these are in the parameter.
pub(super) type Part<'a> = (usize, Values<'a>, Range<usize>);

/// Elements that lie side by side on a stage, and in a parameter.
pub(super) struct Run {
    pub(super) param: usize,
    /// Which they are on the stage.
    pub(super) place: Range<usize>,
    /// Which they are in the parameter.
    pub(super) range: Range<usize>,
}

/// Copies parts to a stage, one after the other; what runs they are there.
pub(super) fn put_together<'a>(
    mut stage: ValuesMut<'_>,
    parts: impl Iterator<Item = Part<'a>>,
) -> SmallVec<[Run; 32]> {
    let mut runs = SmallVec::<[Run; 32]>::new();
    let mut filled = 0;
    for (param, source, range) in parts {
        let place = filled..filled + source.len();
        filled = place.end;
        stage.reborrow().slice(place.clone()).copy_from(source);
        match runs.last_mut() {
            Some(last) if last.param == param && last.range.end == range.start => {
                (last.place.end, last.range.end) = (place.end, range.end);
            }
            _ => runs.push(Run { param, place, range }),
        }
    }
    runs
}
