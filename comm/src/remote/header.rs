//! The contents of messages besides elements, as bytes; `ends` has the ends of steps and worlds.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub(super) use self::ends::{EncodedEnd, end_bytes, end_of};
use crate::Descriptor;

mod ends;

/// The header of a data message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct DataHeader {
    pub(crate) descriptor: Arc<Descriptor>,
    /// The step that its sender is in.
    pub(crate) step: u64,
    pub(crate) form: Form,
}

/// The difference between operations that are described alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Form {
    /// The function that was called.
    pub(crate) function: u8,
    /// A hash of the layout that it was called with; 0 without one.
    pub(crate) layout: u64,
    /// A note of its sender alone.
    pub(crate) note: u64,
}

/// Any header as bytes.
pub(crate) fn bytes(header: &impl Serialize) -> Vec<u8> {
    postcard::to_allocvec(header).expect("numbers, texts and lists are written into memory")
}

/// Any header of bytes, which must be all of it, and as it is written here: a number has one form.
///
/// # Errors
/// The problem with them.
pub(crate) fn read<'a, T: Deserialize<'a> + Serialize>(encoded: &'a [u8]) -> Result<T, String> {
    let (header, rest) = postcard::take_from_bytes(encoded)
        .map_err(|error| format!("its header cannot be read: {error}"))?;
    if !rest.is_empty() {
        return Err(format!("{} bytes follow its header", rest.len()));
    }
    match bytes(&header) == encoded {
        true => Ok(header),
        false => Err("its header is not in canonical form".to_owned()),
    }
}

#[cfg(test)]
mod tests;
