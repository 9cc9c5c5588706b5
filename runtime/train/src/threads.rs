//! The most ranks that are threads of one process. Each takes memory, and turns on the cores.

/// In the examples, which train.
pub const IN_EXAMPLES: usize = 64;

/// In a conformance case: every machine has room for so many.
pub const IN_A_CASE: usize = 128;

/// In a bench: the largest mesh of `overhead`, whose models are small.
pub const IN_A_BENCH: usize = 256;

/// Checks that at most `most` ranks are to run as threads of one process.
///
/// # Errors
/// In words, which begin with the number.
pub fn check(ranks: usize, most: usize) -> Result<(), String> {
    match ranks <= most {
        true => Ok(()),
        false => Err(format!("{ranks} ranks: at most {most} run as threads of one process")),
    }
}

#[cfg(test)]
mod tests {
    use super::check;

    #[test]
    fn the_most_ranks_are_allowed() {
        assert_eq!(check(64, 64), Ok(()));
        let refused = "65 ranks: at most 64 run as threads of one process".to_owned();
        assert_eq!(check(65, 64), Err(refused));
    }
}
