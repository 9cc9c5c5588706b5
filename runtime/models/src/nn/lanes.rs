//! Sums and maxima over rows, in an order that the compiler can vectorize: sixteen lanes that are
//! combined at the end.

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
    let (mut a, mut b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
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
