//! The outputs of members, and contributions that are dropped.

use std::any::Any;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use smallvec::SmallVec;

/// A small value for each member, by slot. Those of few members need no allocation.
pub(crate) type PerMember<T> = SmallVec<[T; 4]>;

/// The members' outputs, by slot.
pub(crate) struct Outputs<O>(pub(crate) Vec<Option<O>>);

impl<O> Outputs<O> {
    /// That of the member in one slot: the others get theirs elsewhere.
    pub(crate) fn only(slot: usize, output: O) -> Self {
        let mut outputs: Vec<_> = (0..slot).map(|_| None).collect();
        outputs.push(Some(output));
        Self(outputs)
    }

    /// Takes the output of a member; `None` if it was taken before.
    pub(crate) fn take(&mut self, slot: usize) -> Option<O> {
        self.0[slot].take()
    }
}

impl<O> FromIterator<O> for Outputs<O> {
    fn from_iter<I: IntoIterator<Item = O>>(outputs: I) -> Self {
        Self(outputs.into_iter().map(Some).collect())
    }
}

/// Drops contributions, where no caller can be told that this panicked. The value of the panic is leaked: it might panic again.
pub(crate) fn discard<T>(contributions: T) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(contributions))) {
        let panic = ManuallyDrop::new(panic);
        hsdp_warnings::warn!(
            panic = %panic_message(&**panic),
            "a buffer or gradient that a rank had lent panicked when it was dropped"
        );
    }
}

/// The message of a panic, as far as it has one.
pub(crate) fn panic_message(payload: &(dyn Any + Send)) -> Arc<str> {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("(a panic without a message)").into()
}
