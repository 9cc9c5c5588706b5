//! Compares every declaration with a copy of `nccl.h`, an enum that functions return in both directions, and tests the comparison with
//! headers that are wrong.
//!
//! `$HSDP_NCCL_HEADER` names the header of any release from 2.18.1 on. Otherwise the test searches the folders of NCCL's
//! package from PyPI (`places`). If there is no header, that test is ignored, with the reason.
//!
//! In reading order: `tokens`, `parse` (a header becomes a `Header`), `types` (C types in Rust), `check` (the comparison),
//! `wrong` (headers that must fail the check).

mod check;
mod parse;
#[path = "../places/mod.rs"]
mod places;
mod tokens;
mod types;
mod wrong;

use std::fs;

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use nccl_sys::declared;

use crate::check::Check;
use crate::parse::Header;

/// Numbers of `nccl.h` that the crate does not declare, in enums that functions return: names, each with the reason.
pub(crate) const EXCEPTIONS: &[(&str, &str)] =
    &[("ncclNumResults", "it counts the other names and moves from version to version")];

fn main() {
    let arguments = Arguments::from_args();
    let mut trials = wrong::trials();
    trials.push(Trial::ignorable_test("what_is_declared_is_what_the_header_says", compare));
    libtest_mimic::run(&arguments, trials).exit();
}

fn compare() -> Result<Completion, Failed> {
    let variable = "HSDP_NCCL_HEADER";
    let file = "include/nccl.h";
    let Some(path) = places::find(variable, file) else {
        return Ok(Completion::ignored_with(places::missing(variable, file)));
    };
    let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let header = Header::parse(&text)?;
    let version = header.version()?;
    let check =
        Check { header: &header, declared: &declared::ALL, exceptions: EXCEPTIONS, version };
    let problems = check.problems();
    if problems.is_empty() {
        return Ok(Completion::Completed);
    }
    Err(format!("{} is {version}:\n{}", path.display(), problems.join("\n")).into())
}
