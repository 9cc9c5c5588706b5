//! The work of an operation whose other members share no memory with this one: to make of what came what this member gets.

use std::sync::Arc;

use super::journey::Journey;
use super::statement::Form;
use super::travels::{Parcel, Parcels, Travels, Turn};
use crate::execute::{Meter, NextRound, Outputs, PerMember, Work};
use crate::sync::Mutex;

/// What lies in a slot.
pub(crate) enum Deposit<S> {
    /// What this member brings.
    Own(S),
    /// What another sent.
    Other(Parcel),
}

/// One block, which unpacks.
pub(crate) struct Unpack<S: Travels> {
    journey: Arc<Journey<S>>,
    parcels: Parcels,
    /// How many bytes of each member something else carries, by slot, if something does.
    beside: Option<PerMember<usize>>,
    stage: Mutex<Stage<S>>,
}

enum Stage<S: Travels> {
    Packed(S),
    Unpacked(Turn<S>),
    /// For a moment, or for ever if unpacking panicked.
    Nothing,
}

impl<S: Travels> Unpack<S> {
    /// # Errors
    /// If what came does not fit.
    pub(super) fn new(journey: Arc<Journey<S>>, deposits: Vec<Deposit<S>>) -> Result<Self, String> {
        let (mut own, mut parcels) = (None, Vec::with_capacity(deposits.len()));
        for deposit in deposits {
            parcels.push(match deposit {
                Deposit::Own(mine) => {
                    own = Some(mine);
                    None
                }
                Deposit::Other(parcel) => Some(parcel),
            });
        }
        let (own, parcels) = (own.ok_or("this member has no input")?, Parcels(parcels));
        let Form { function, layout, .. } = own.form();
        let others = (0..parcels.0.len()).filter_map(|from| parcels.brought(from));
        let mut forms = others.map(|brought| brought.form);
        if forms.clone().any(|form| form.function != function) {
            return Err("ranks call different functions".to_owned());
        }
        if forms.any(|form| form.layout != layout) {
            return Err("ranks have different layouts of one unit".to_owned());
        }
        own.check(journey.at(), &parcels)?;
        let of = |from| own.beside(journey.at(), from);
        let beside = (0..journey.at().members()).map(of).collect();
        Ok(Self { journey, parcels, beside, stage: Mutex::new(Stage::Packed(own)) })
    }
}

impl<S: Travels> Work for Unpack<S> {
    type Output = S::Output;

    fn blocks(&self) -> usize {
        1
    }

    /// What something else carries may wait for other ranks: that is never the courier's work, for which others wait.
    fn bytes(&self) -> usize {
        match self.beside {
            Some(_) => usize::MAX,
            None => (0..self.parcels.0.len()).map(|from| self.parcels.bytes(from).len()).sum(),
        }
    }

    /// Not code of users, but of NCCL: whoever waits for something else is not drawn into it.
    fn calls_users(&self) -> bool {
        self.beside.is_some()
    }

    fn run(&self, _block: usize, meter: &Meter<'_>) {
        let at = self.journey.at();
        let Stage::Packed(own) = std::mem::replace(&mut *self.stage.lock(), Stage::Nothing) else {
            unreachable!("a block is run once")
        };
        let turn = own.unpack(at, &self.parcels);
        *self.stage.lock() = Stage::Unpacked(turn);
        for from in 0..at.members() {
            let beside = self.beside.as_ref().map_or(0, |beside| beside[from]);
            meter.received(at.slot, from, self.parcels.bytes(from).len() + beside, 1);
        }
    }

    fn next_round(&mut self) -> Option<NextRound> {
        let mut stage = self.stage.lock();
        match std::mem::replace(&mut *stage, Stage::Nothing) {
            Stage::Unpacked(Turn::Again(own)) => {
                let journey = Arc::clone(&self.journey);
                Some(Box::new(move |operation| journey.go_on(operation, own)))
            }
            other => {
                *stage = other;
                None
            }
        }
    }

    fn finish(self) -> Outputs<S::Output> {
        let Stage::Unpacked(Turn::Done(output)) = self.stage.into_inner() else {
            unreachable!("every block was run, and there is no other round")
        };
        Outputs::only(self.journey.at().slot, output)
    }
}
