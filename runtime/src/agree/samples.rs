//! The comparison of samples, which finds two ranks with the same ones. PROTOCOL.md, "A step".

use hsdp_comm::Stage;
use hsdp_sharding::Rank;
use hsdp_sharding::step::Intent;

use crate::agree::header::StepHeader;
use crate::error::Error;
use crate::options::samples::{NONE, Samples};
use crate::options::uneven::Input;
use crate::state::context::Context;

/// Compares the digests of all ranks. A rank without data has named none. Collective over the
/// world.
///
/// # Errors
/// [`Error::SameSamples`] on all ranks; [`Error::Comm`].
pub(crate) fn compare(context: &Context, header: &StepHeader) -> Result<(), Error> {
    let step = header.step;
    let has_data = matches!(header.intent, Intent::Step { input: Input::Ready, .. });
    let said = header.samples.filter(|_| has_data).map_or(NONE, Samples::digest);
    match context.control.exchange(context.tag(None, Stage::Header, step, 0), [said], twins)? {
        None => Ok(()),
        Some([first, second]) => {
            let [rank, other] = [second, first].map(Rank::new);
            Err(Error::SameSamples { step, rank, other })
        }
    }
}

/// The first two ranks that have named the same samples.
fn twins(said: &[u64]) -> Option<[usize; 2]> {
    let named = || said.iter().enumerate().filter(|(_, digest)| **digest != NONE);
    named().find_map(|(second, digest)| {
        let first = named().take_while(|(rank, _)| *rank < second).find(|(_, it)| *it == digest);
        first.map(|(first, _)| [first, second])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_two_that_are_the_same_are_found_and_who_named_none_is_not() {
        assert_eq!(twins(&[]), None);
        assert_eq!(twins(&[0, 0, 7, 0]), None);
        assert_eq!(twins(&[5, 0, 7, 5, 7]), Some([0, 3]));
    }
}
