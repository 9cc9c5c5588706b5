//! Measures of elements: their norm, their distance from others, and whether they are finite.

use crate::simd::vectorized;

/// The number of sums that the squared norm keeps: enough to fill the vector units while each
/// addition waits for the one before.
const LANES: usize = 16;

/// The number of elements that are checked before the result is tested.
const STRIDE: usize = 1024;

/// The sum of the squares of `values`, in f64.
///
/// Element `i` is added to sum `i mod 16`, and the sixteen sums are added in a fixed order. So the
/// result depends on the values and their order, and not on the machine. It does depend on where a
/// slice starts: ranks that must agree bit for bit must cut their slices alike.
pub fn squared_norm(values: &[f32]) -> f64 {
    vectorized(
        #[inline(always)]
        || sum_of_squares(values),
    )
}

/// The sum of the squares of the differences between `values` and `others`, in f64. The order of
/// additions is that of [`squared_norm`].
///
/// # Panics
/// If the slices differ in length.
pub fn squared_distance(values: &[f32], others: &[f32]) -> f64 {
    assert_eq!(values.len(), others.len(), "squared distance: the lengths differ");
    vectorized(
        #[inline(always)]
        || {
            let mut sums = [0.0; LANES];
            for (values, others) in values.chunks(LANES).zip(others.chunks(LANES)) {
                for (sum, (&value, &other)) in sums.iter_mut().zip(values.iter().zip(others)) {
                    let difference = f64::from(value) - f64::from(other);
                    *sum += difference * difference;
                }
            }
            in_pairs(sums)
        },
    )
}

/// The index of the first element that is infinite or NaN; `None` if all are finite.
pub fn first_non_finite(values: &[f32]) -> Option<usize> {
    let suspect = vectorized(
        #[inline(always)]
        || suspect_stride(values),
    )?;
    let offset = values[suspect..].iter().position(|value| !value.is_finite())?;
    Some(suspect + offset)
}

/// Returns 0 for a finite value, and other bits for an infinity or a NaN. Always inlined into the
/// loop, where a subtraction takes less time than a comparison of the exponent.
#[inline(always)]
#[expect(clippy::eq_op, reason = "the difference is NaN if the value is not finite")]
pub(crate) fn non_finite_bits(value: f32) -> u32 {
    (value - value).to_bits()
}

/// The loop of [`squared_norm`].
#[inline(always)]
pub(crate) fn sum_of_squares(values: &[f32]) -> f64 {
    let (rows, rest) = values.as_chunks();
    // The last row is filled up with zeros, which change no sum.
    let mut last = [0.0; LANES];
    last[..rest.len()].copy_from_slice(rest);
    let sums = add_squares(add_squares([0.0; LANES], rows), &[last]);
    in_pairs(sums)
}

/// Adds the squares of each row to the sums. The sums stay in registers.
#[inline(always)]
fn add_squares(mut sums: [f64; LANES], rows: &[[f32; LANES]]) -> [f64; LANES] {
    for row in rows {
        for (sum, &value) in sums.iter_mut().zip(row) {
            *sum += f64::from(value) * f64::from(value);
        }
    }
    sums
}

/// Adds the second half to the first, and so on, until one sum is left.
#[inline(always)]
fn in_pairs(mut sums: [f64; LANES]) -> f64 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
        width /= 2;
    }
    sums[0]
}

/// Finds the start of the first stride that holds an infinity or a NaN.
#[inline(always)]
fn suspect_stride(values: &[f32]) -> Option<usize> {
    for (index, stride) in values.chunks(STRIDE).enumerate() {
        // Without an early exit, so that the loop vectorizes.
        let mut suspect = 0;
        for value in stride {
            suspect |= non_finite_bits(*value);
        }
        if suspect != 0 {
            return Some(index * STRIDE);
        }
    }
    None
}

#[cfg(test)]
mod tests;
