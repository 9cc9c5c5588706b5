//! A value of a device that is made when it is first needed.

use std::sync::OnceLock;

use parking_lot::Mutex;

use super::error::CudaError;

/// A value that is made once. A failure to make it is not kept, so a later call can succeed.
#[derive(Debug)]
pub(super) struct Once<T> {
    value: OnceLock<T>,
    /// Locked while the value is made.
    making: Mutex<()>,
}

impl<T> Default for Once<T> {
    fn default() -> Self {
        Self { value: OnceLock::new(), making: Mutex::new(()) }
    }
}

impl<T> Once<T> {
    /// The value, which `make` makes if there is none. Threads make it one after the other.
    pub(super) fn get_or_try_init(
        &self,
        make: impl FnOnce() -> Result<T, CudaError>,
    ) -> Result<&T, CudaError> {
        if let Some(value) = self.value.get() {
            return Ok(value);
        }
        let _making = self.making.lock();
        match self.value.get() {
            Some(value) => Ok(value),
            None => make().map(|value| self.value.get_or_init(|| value)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_success_is_kept() {
        let once = Once::default();
        let refused = once.get_or_try_init(|| Err(CudaError::NotBuilt));
        assert_eq!(refused, Err(CudaError::NotBuilt));
        assert_eq!(once.get_or_try_init(|| Ok(1)), Ok(&1));
        assert_eq!(once.get_or_try_init(|| Ok(2)), Ok(&1));
        assert_eq!(once.get_or_try_init(|| Err(CudaError::NotBuilt)), Ok(&1));
    }
}
