//! Work of any type.

use std::any::Any;

use crate::execute::{Meter, NextRound, Work};

/// [`Work`] with the type of its outputs erased.
pub(crate) trait AnyWork: Send + Sync {
    fn blocks(&self) -> usize;
    fn bytes(&self) -> usize;
    fn calls_users(&self) -> bool;
    fn run(&self, block: usize, meter: &Meter<'_>);
    fn next_round(&mut self) -> Option<NextRound>;
    /// [`Outputs`] of the work.
    fn finish(self: Box<Self>) -> Box<dyn Any + Send>;
}

impl<W: Work> AnyWork for W {
    fn blocks(&self) -> usize {
        Work::blocks(self)
    }

    fn bytes(&self) -> usize {
        Work::bytes(self)
    }

    fn calls_users(&self) -> bool {
        Work::calls_users(self)
    }

    fn run(&self, block: usize, meter: &Meter<'_>) {
        Work::run(self, block, meter);
    }

    fn next_round(&mut self) -> Option<NextRound> {
        Work::next_round(self)
    }

    fn finish(self: Box<Self>) -> Box<dyn Any + Send> {
        Box::new(Work::finish(*self))
    }
}
