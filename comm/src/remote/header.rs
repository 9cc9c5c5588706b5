//! The contents of messages besides elements, as bytes; `ends` has the ends of steps and worlds.

use std::sync::Arc;

use postcard::ser_flavors::Flavor;
use serde::{Deserialize, Serialize};

pub(crate) use self::ends::{end_bytes, end_of};
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

/// The header of a data message, as bytes.
pub(crate) fn data_header_bytes(data_header: &DataHeader) -> Vec<u8> {
    bytes(data_header)
}

/// The header of a data message, of its bytes.
///
/// # Errors
/// The problem with them.
pub(crate) fn data_header_of(bytes: &[u8]) -> Result<DataHeader, String> {
    read(bytes)
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
    match postcard::serialize_with_flavor(&header, Written(encoded)) {
        Ok(()) => Ok(header),
        Err(_) => Err("its header is not in canonical form".to_owned()),
    }
}

/// Compares what is written with these bytes, and keeps none.
struct Written<'a>(&'a [u8]);

impl Flavor for Written<'_> {
    type Output = ();

    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        self.0 = self.0.strip_prefix(bytes).ok_or(postcard::Error::SerializeBufferFull)?;
        Ok(())
    }

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.try_extend(&[byte])
    }

    fn finalize(self) -> postcard::Result<()> {
        if self.0.is_empty() { Ok(()) } else { Err(postcard::Error::SerializeBufferFull) }
    }
}

#[cfg(test)]
mod tests;
