//! What all ranks agreed on stays as it is.

use hsdp::{Gradients, Verdict};

fn apply_anyway(gradients: &mut Gradients) {
    gradients.verdict = Verdict::Apply;
}

fn main() {}
