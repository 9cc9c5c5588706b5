//! The memory of activations: what a forward keeps for its backward.
//!
//! Of a GPT without recomputation this is within a tenth of the formula of Korthikanti et al., "Reducing Activation Recomputation in Large
//! Transformer Models" (2022): 34 bytes by token and width, and 5 by score.

use hsdp_sharding::{ByteCount, DType};

use super::batch::{Batch, Recompute};
use super::shapes::{Product, Scores, UnitShapes};

/// Elements that are kept by stored score: normalized, dropped out, and which were dropped, in half an element.
const OF_SCORE: f64 = 2.5;
/// Bytes by class and token, beside the result itself: that in f32, and its gradient.
const OF_CLASS: f64 = 8.0;

pub(super) fn of_unit(unit: &UnitShapes, batch: &Batch) -> ByteCount {
    bytes(kept(unit, batch))
}

/// Returns the bytes of all units, and of the results at the end of the forward, or later of what
/// one unit after the other computes again. The results are `classes` a token, in the dtype
/// `compute` if their unit declares one.
pub(super) fn of_model(
    units: &[UnitShapes],
    (classes, compute): (usize, Option<DType>),
    batch: &Batch,
) -> ByteCount {
    let all: f64 = units.iter().map(|unit| kept(unit, batch)).sum();
    let whole = Batch { recompute: Recompute::Nothing, ..*batch };
    let again = units.iter().map(|unit| kept(unit, &whole) - kept(unit, batch));
    let again = again.fold(0.0, f64::max);
    let results = (OF_CLASS + batch.element(compute)) * classes as f64 * batch.tokens();
    bytes(all + again.max(results))
}

/// The bytes that a unit keeps.
fn kept(unit: &UnitShapes, batch: &Batch) -> f64 {
    // The first product may be narrower, such as that of an adapter.
    let inputs = unit.products.iter().map(Product::smaller).max().unwrap_or(0) as f64;
    let computed = unit.widths() * batch.tokens();
    let stored = unit.attention.filter(|it| it.scores == Scores::Stored);
    let scores = stored.map_or(0.0, |attention| batch.scores(&attention));
    let elements = match batch.recompute {
        Recompute::Nothing => OF_SCORE.mul_add(scores, computed),
        Recompute::Attention => computed,
        Recompute::Unit => inputs * batch.tokens(),
    };
    elements * batch.element(unit.compute)
}

fn bytes(count: f64) -> ByteCount {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "casts of floats saturate, and no count is negative"
    )]
    let count = count.ceil() as u64;
    ByteCount(count)
}
