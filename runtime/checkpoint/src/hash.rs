//! Hashes: BLAKE3 (O'Connor, Aumasson, Neves, Wilcox-O'Hearn, 2020), 32 bytes, written as hexadecimal digits.

use std::fmt;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The BLAKE3 hash of some bytes. `Display` and JSON have it as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Hash(blake3::Hash);

impl Hash {
    /// The hash of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(blake3::hash(bytes))
    }

    pub(crate) fn finish(hasher: &blake3::Hasher) -> Self {
        Self(hasher.finalize())
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0.to_hex())
    }
}

impl fmt::Debug for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl Serialize for Hash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0.to_hex())
    }
}

impl<'de> Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'_, str>::deserialize(deserializer)?;
        blake3::Hash::from_hex(&*text).map(Self).map_err(D::Error::custom)
    }
}
