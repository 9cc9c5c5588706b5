//! Gradients on which all ranks have agreed stay as they are.

use hsdp::{Gradients, Verdict};

fn apply_anyway(gradients: &mut Gradients) {
    gradients.verdict = Verdict::Apply;
}

fn main() {}
