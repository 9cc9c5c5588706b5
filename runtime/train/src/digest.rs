//! A digest of an input, for comparison between processes.

use std::fmt;

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Length and hash of an input, which processes compare when each has its own copy.
///
/// ```
/// use hsdp_train::Digest;
///
/// let text = Digest::of(b"to be or not to be");
/// assert_eq!(text.to_string(), "18 bytes with hash d54dabe2451f3601");
/// assert_ne!(text, Digest::of(b"to be or not to bee"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest {
    bytes: usize,
    hash: u64,
}

impl Digest {
    /// Returns the digest of `bytes`. It detects accidents, not forgery: the hash is not
    /// cryptographic.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self { bytes: bytes.len(), hash: xxh3_64_with_seed(bytes, 0) }
    }

    /// Returns the hash alone.
    #[must_use]
    pub fn hash(&self) -> u64 {
        self.hash
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes with hash {:016x}", self.bytes, self.hash)
    }
}
