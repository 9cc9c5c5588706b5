//! Conformance cases: those in `tests/cases`, which `FORMAT.md` there describes, cases made at
//! random, and the runner as a program.

mod bounds;
mod cases;
mod program;
mod vjp;

use std::path::{Path, PathBuf};

fn cases_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("cases")
}
