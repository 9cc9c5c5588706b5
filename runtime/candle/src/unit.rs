//! One unit in one microbatch: where its parameters are, and which of its gradients are still to
//! come.
//!
//! ```text
//!            forward                                  backward
//!   Unused ---gather---> Full ---reshard---> Freed ---gather---> Full ---settle---> Done
//!                          \______________(kept)__________________/
//! ```
//!
//! A unit is done when two conditions hold. Every trainable parameter that was read has its
//! gradient: candle finishes all readers of a tensor before the tensor itself. And no use holds the
//! unit for its frozen parameters, which have no gradient (see [`Usage`](crate::usage::Usage)).

use std::mem;
use std::sync::Arc;

use candle_core::{Device, Shape, Tensor};
use hsdp::{Full, GradientValues, PassHandle, UnitId};
use hsdp_sharding::{AfterForward, Role};
use parking_lot::Mutex;

use crate::error::Error;
use crate::gathered::{Gathered, vacate};
use crate::gradient;

/// A unit in one microbatch. Custom ops hold it, so it holds no tensor that an op made: that would
/// be a cycle.
#[derive(Debug)]
pub(crate) struct UnitState {
    id: UnitId,
    handle: PassHandle,
    /// The device on which candle computes.
    device: Device,
    ledger: Mutex<Ledger>,
}

#[derive(Debug)]
struct Ledger {
    contents: Contents,
    /// For each parameter that was read, a tensor without an op that shares its storage.
    storages: Vec<Option<Tensor>>,
    gradients: Vec<Option<Arc<dyn GradientValues>>>,
    /// Trainable parameters that were read and have no gradient yet.
    awaited: usize,
    /// Uses whose backward may still read frozen parameters.
    holds: usize,
}

#[derive(Debug)]
enum Contents {
    /// Not gathered so far.
    Unused,
    /// Freed after its use in the forward; the storages are vacant.
    Freed,
    /// Gathered. The parameters that were read are in their storages; the others are in this `Full`.
    Full(Full),
    /// Not needed any more in this microbatch.
    Done,
}

impl UnitState {
    pub(crate) fn new(id: UnitId, handle: PassHandle, device: Device) -> Self {
        let parameters = handle.plan().spec()[id].params.len();
        let ledger = Ledger {
            contents: Contents::Unused,
            storages: vec![None; parameters],
            gradients: vec![None; parameters],
            awaited: 0,
            holds: 0,
        };
        Self { id, handle, device, ledger: Mutex::new(ledger) }
    }

    /// Whether the parameter is trainable or frozen.
    pub(crate) fn role(&self, index: usize) -> Role {
        self.handle.plan().spec()[self.id].params[index].role
    }

    /// The shape of a parameter.
    pub(crate) fn shape(&self, index: usize) -> Shape {
        Shape::from(self.handle.plan().spec()[self.id].params[index].shape.clone())
    }

    /// Makes the parameters full for a use in the forward. May wait for a gather, and so for other
    /// ranks.
    pub(crate) fn gather(&self) -> Result<(), Error> {
        let mut ledger = self.ledger.lock();
        match ledger.contents {
            Contents::Full(_) => Ok(()),
            Contents::Unused => self.unshard(&mut ledger),
            Contents::Freed | Contents::Done => {
                Err(Error::Freed { unit: self.handle.plan().spec()[self.id].name.clone() })
            }
        }
    }

    /// Makes the parameters full for the backward of a use.
    pub(crate) fn gather_again(&self) -> Result<(), Error> {
        let mut ledger = self.ledger.lock();
        match ledger.contents {
            Contents::Full(_) | Contents::Done => Ok(()),
            Contents::Unused | Contents::Freed => self.unshard(&mut ledger),
        }
    }

    fn unshard(&self, ledger: &mut Ledger) -> Result<(), Error> {
        let _span = tracing::trace_span!("gather", unit = self.id.index()).entered();
        let mut full = self.handle.unshard(self.id)?;
        for (index, storage) in ledger.storages.iter().enumerate() {
            if let Some(storage) = storage {
                let parameter = Gathered::take(&mut full, index, &self.device);
                parameter.map_or(Ok(()), |parameter| parameter.fill(storage))?;
            }
        }
        ledger.contents = Contents::Full(full);
        Ok(())
    }

    /// Takes out a parameter that was not read before.
    ///
    /// # Panics
    /// If the unit is not full or the parameter was read before. The pass ensures that neither is so.
    pub(crate) fn take(&self, index: usize) -> Gathered {
        match &mut self.ledger.lock().contents {
            Contents::Full(full) => {
                Gathered::take(full, index, &self.device).expect("the pass takes a parameter once")
            }
            other => unreachable!("the pass has gathered the unit, but it is {other:?}"),
        }
    }

    /// Notes that a parameter was read, as `tensor`.
    pub(crate) fn was_read(&self, index: usize, tensor: &Tensor) {
        let mut ledger = self.ledger.lock();
        ledger.storages[index] = Some(tensor.detach());
        ledger.awaited += usize::from(self.role(index) == Role::Trainable);
    }

    /// Frees the parameters after a use in the forward, unless the unit is kept.
    pub(crate) fn reshard(&self) -> Result<(), Error> {
        match self.handle.plan().spec()[self.id].after_forward {
            AfterForward::Reshard => self.ledger.lock().free(Contents::Freed),
            AfterForward::Keep => Ok(()),
        }
    }

    /// Takes the complete gradient of a parameter. The last one starts the reduction of the unit.
    pub(crate) fn accept(&self, index: usize, gradient: &Tensor) -> Result<(), Error> {
        let mut ledger = self.ledger.lock();
        ledger.gradients[index] = Some(gradient::lent(gradient)?);
        ledger.awaited -= 1;
        self.settle(&mut ledger)
    }

    /// Keeps the unit full until a [`release`](Self::release), whatever gradients come; without one,
    /// until the [`finish`](Self::finish).
    pub(crate) fn hold(&self) {
        self.ledger.lock().holds += 1;
    }

    /// Takes a [`hold`](Self::hold) back.
    pub(crate) fn release(&self) -> Result<(), Error> {
        let mut ledger = self.ledger.lock();
        ledger.holds -= 1;
        self.settle(&mut ledger)
    }

    /// After the backward: frees the parameters, and reduces the gradients that came, even if others
    /// are missing.
    pub(crate) fn finish(&self) -> Result<(), Error> {
        let mut ledger = self.ledger.lock();
        ledger.free(Contents::Done)?;
        self.reduce(&mut ledger)
    }

    /// Forgets the microbatch. A graph of it that is used later finds the unit freed, and its
    /// handle stale.
    pub(crate) fn end(&self) -> Result<(), Error> {
        self.ledger.lock().free(Contents::Freed)
    }

    fn settle(&self, ledger: &mut Ledger) -> Result<(), Error> {
        if ledger.awaited > 0 {
            return Ok(());
        }
        if ledger.holds == 0 {
            ledger.free(Contents::Done)?;
        }
        self.reduce(ledger)
    }

    /// Reduces the gradients that there are. A unit without any is left to the end of the microbatch.
    fn reduce(&self, ledger: &mut Ledger) -> Result<(), Error> {
        if ledger.gradients.iter().all(Option::is_none) {
            return Ok(());
        }
        let none = vec![None; ledger.gradients.len()];
        let gradients = mem::replace(&mut ledger.gradients, none);
        Ok(self.handle.reduce(self.id, gradients)?)
    }
}

impl Ledger {
    fn free(&mut self, contents: Contents) -> Result<(), Error> {
        let mut before = mem::replace(&mut self.contents, contents);
        for (index, storage) in self.storages.iter().enumerate() {
            let Some(storage) = storage else { continue };
            if let (Some(buffer), Contents::Full(full)) = (vacate(storage)?, &mut before) {
                full.put_back(index, buffer);
            }
        }
        Ok(())
    }
}
