//! Versions of NCCL.

use std::fmt;

/// A version of NCCL, in the encoding of `ncclGetVersion`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(u32);

impl Version {
    /// The oldest version that is loaded: the first with `ncclCommSplit`.
    pub const OLDEST: Self = Self::new(2, 18, 0);

    /// The newest version whose declarations this crate has. Newer versions are loaded, without their additions.
    pub const NEWEST: Self = Self::new(2, 32, 3);

    /// The version `major.minor.patch`, in the encoding since 2.9.
    #[must_use]
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self(major * 10_000 + minor * 100 + patch)
    }

    /// The version with this code.
    #[must_use]
    pub const fn from_code(code: u32) -> Self {
        Self(code)
    }

    /// `NCCL_VERSION_CODE` in the header of this version.
    #[must_use]
    pub const fn code(self) -> u32 {
        self.0
    }

    /// Major, minor and patch. Up to 2.8 a code had four digits: 2804 is 2.8.4.
    #[must_use]
    pub const fn parts(self) -> (u32, u32, u32) {
        let major = if self.0 < 10_000 { 1000 } else { 10_000 };
        (self.0 / major, self.0 % major / 100, self.0 % 100)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor, patch) = self.parts();
        write!(f, "{major}.{minor}.{patch}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_read_as_nccl_writes_them() {
        for (code, version) in [(23_203, "2.32.3"), (21_801, "2.18.1"), (2804, "2.8.4")] {
            assert_eq!(Version::from_code(code).to_string(), version);
        }
        assert_eq!(Version::new(2, 18, 1).code(), 21_801);
        assert!(Version::from_code(2804) < Version::OLDEST);
    }
}
