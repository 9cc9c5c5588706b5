//! The points at which fits begin.

use super::range::Range;

const POINTS: usize = 100;

/// Points of a sequence that fills a cube evenly (Halton's), around `own`.
pub(super) fn around(own: &[f64], ranges: &[Range]) -> Vec<Vec<f64>> {
    let primes = (2..).filter(|n: &usize| (2..*n).all(|divisor| !n.is_multiple_of(divisor)));
    let primes: Vec<usize> = primes.take(own.len()).collect();
    let point = |index: usize| {
        let ways = primes.iter().map(|prime| mirrored(index, *prime));
        let places = ranges.iter().zip(own).zip(ways);
        places.map(|((range, own), way)| range.start(*own, way)).collect()
    };
    (1..=POINTS).map(point).collect()
}

/// The digits of `index` in `base`, behind the point and in reverse order: 6 = 110 in base 2 gives 0.011.
fn mirrored(mut index: usize, base: usize) -> f64 {
    let (mut sum, mut unit) = (0.0, 1.0);
    while index > 0 {
        unit /= base as f64;
        sum += unit * (index % base) as f64;
        index /= base;
    }
    sum
}
