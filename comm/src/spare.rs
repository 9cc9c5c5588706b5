//! Shared values whose memory is used again once nobody has them any more.

use std::collections::VecDeque;
use std::fmt;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::sync::Mutex;

/// How many are looked at for one that is free.
const LOOKS: usize = 4;

/// How many are kept: more than that at once are freed like any other.
const MOST: usize = 1 << 10;

/// Shared values that are over, or will be.
pub(crate) struct Aside<T>(VecDeque<Arc<T>>);

/// A value in the memory of a shared one, that nobody else has yet.
pub(crate) struct Own<T>(Arc<T>);

impl<T> Aside<T> {
    /// Puts one aside.
    pub(crate) fn put(&mut self, shared: Arc<T>) {
        if self.0.len() < MOST {
            self.0.push_back(shared);
        }
    }

    /// Takes one out that nobody else has, of the last that were put here: they are over, or almost, and still in a cache.
    pub(crate) fn take_newest(&mut self) -> Option<Own<T>> {
        let newest = (0..self.0.len()).rev().take(LOOKS);
        // Where those are held for long, others are not forgotten.
        let mut places = newest.chain((!self.0.is_empty()).then_some(0));
        let free = places.find(|place| is_free(&self.0[*place]))?;
        self.0.swap_remove_back(free).map(Own)
    }

    /// The same, of the first: the last ones are in use.
    pub(crate) fn take_oldest(&mut self) -> Option<Own<T>> {
        for _ in 0..self.0.len().min(LOOKS) {
            let oldest = self.0.pop_front()?;
            if is_free(&oldest) {
                return Some(Own(oldest));
            }
            self.0.push_back(oldest);
        }
        None
    }
}

/// Whether nobody else has it. It stays so: only who has it could give it to others.
fn is_free<T>(shared: &Arc<T>) -> bool {
    Arc::strong_count(shared) == 1
}

impl<T> Own<T> {
    pub(crate) fn share(self) -> Arc<T> {
        self.0
    }
}

impl<T> Deref for Own<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for Own<T> {
    fn deref_mut(&mut self) -> &mut T {
        Arc::get_mut(&mut self.0).expect("nobody gets it before it is shared")
    }
}

impl<T> Default for Aside<T> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<T> fmt::Debug for Aside<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Aside").field("kept", &self.0.len()).finish_non_exhaustive()
    }
}

/// Makes shared values, in the memory of those that were made before.
pub(crate) struct Spare<T>(Mutex<Aside<T>>);

impl<T> Spare<T> {
    pub(crate) fn share(&self, value: T) -> Arc<T> {
        let mut made = self.0.lock();
        let (shared, former) = match made.take_oldest() {
            Some(mut free) => {
                let former = mem::replace(&mut *free, value);
                (free.share(), Some(former))
            }
            None => (Arc::new(value), None),
        };
        made.put(Arc::clone(&shared));
        drop(made);
        // What it held may have a drop of its own: without the lock.
        drop(former);
        shared
    }
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
        assert_eq!(spare.0.lock().0.len(), MOST);
    }
}
