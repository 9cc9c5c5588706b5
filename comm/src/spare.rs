//! Shared values whose memory is used again once nobody has them any more.

use std::collections::VecDeque;
use std::fmt;
use std::mem;
use std::sync::Arc;

use crate::sync::Mutex;

/// How many are looked at for one that is free.
const LOOKS: usize = 4;

/// How many are kept: more than that at once are freed like any other.
const MOST: usize = 1 << 10;

/// Makes shared values, in the memory of those that were made before.
pub(crate) struct Spare<T>(Mutex<VecDeque<Arc<T>>>);

impl<T> Spare<T> {
    pub(crate) fn share(&self, value: T) -> Arc<T> {
        let mut made = self.0.lock();
        let (shared, former) = match take_free(&mut made) {
            Some(mut free) => {
                let own = Arc::get_mut(&mut free).expect("nobody gets it before it is shared");
                let former = mem::replace(own, value);
                (free, Some(former))
            }
            None => (Arc::new(value), None),
        };
        if made.len() < MOST {
            made.push_back(Arc::clone(&shared));
        }
        drop(made);
        // What it held may have a drop of its own: without the lock.
        drop(former);
        shared
    }
}

/// Takes one out that nobody else has, of the first: the last ones are in use.
fn take_free<T>(made: &mut VecDeque<Arc<T>>) -> Option<Arc<T>> {
    for _ in 0..made.len().min(LOOKS) {
        let mut oldest = made.pop_front()?;
        if Arc::get_mut(&mut oldest).is_some() {
            return Some(oldest);
        }
        made.push_back(oldest);
    }
    None
}

impl<T> Default for Spare<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> fmt::Debug for Spare<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spare").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_once_nobody_holds_it() {
        let spare = Spare::default();
        let first = spare.share(1);
        let address = Arc::as_ptr(&first);
        let second = spare.share(2);
        assert_ne!(Arc::as_ptr(&second), address, "the first is held");
        drop(first);
        let third = spare.share(3);
        assert_eq!((Arc::as_ptr(&third), *third, *second), (address, 3, 2));
    }

    #[test]
    fn who_holds_some_for_long_keeps_nobody_from_the_others() {
        let spare = Spare::default();
        let held: Vec<_> = (0..3).map(|number| spare.share(number)).collect();
        let address = Arc::as_ptr(&spare.share(3));
        (0..10).for_each(|number| assert_eq!(Arc::as_ptr(&spare.share(number)), address));
        assert_eq!(held.iter().map(|number| **number).collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn no_more_than_some_are_kept() {
        let spare = Spare::default();
        let held: Vec<_> = (0..MOST + 10).map(|number| spare.share(number)).collect();
        drop(held);
        assert_eq!(spare.0.lock().len(), MOST);
    }
}
