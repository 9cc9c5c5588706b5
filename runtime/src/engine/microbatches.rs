//! How many microbatches a step has: as many as was said, or as long as ranks have data. PROTOCOL.md, "A step".

use hsdp_comm::Stage;

use crate::engine::fabric::Fabric;
use crate::engine::gathers::GatherQueue;
use crate::engine::shard::Shard;
use crate::engine::step_state::{OpenMicrobatch, StepState, Token};
use crate::error::Error;
use crate::microbatch_header;
use crate::uneven::{Course, Input, Supply, Uneven};

/// The step has no other microbatch, since ranks have no more data.
#[derive(Clone, Debug)]
pub(crate) struct NoMore {
    /// The number of the one that does not take place.
    pub(crate) microbatch: usize,
    pub(crate) supply: Supply,
}

impl StepState {
    pub(crate) fn begin_microbatch(
        &mut self,
        fabric: &Fabric,
    ) -> Result<Result<Token, NoMore>, Error> {
        let refuse = |what: String| Err(fabric.misuse("microbatch", self.number(), what));
        if self.open.is_some() {
            return refuse(format!("microbatch {} was begun and not finished", self.finished));
        }
        if self.microbatches == Some(self.finished) {
            return refuse(format!(
                "the step was begun with {} microbatches, all are done",
                self.finished
            ));
        }
        if self.microbatches.is_none() {
            self.ask_for_microbatch(fabric, Input::Ready)?;
        }
        if let Some(supply) = &self.ended {
            return Ok(Err(NoMore { microbatch: self.finished, supply: supply.clone() }));
        }
        self.open(fabric);
        Ok(Ok(Token { opened: self.opened, microbatch: self.finished }))
    }

    fn open(&mut self, fabric: &Fabric) {
        let gathers = GatherQueue::new(fabric, self.number(), self.finished);
        self.reductions.begin_microbatch();
        self.open = Some(OpenMicrobatch { gathers, loss: None });
    }

    /// Goes through the microbatches that other ranks still bring, with weight 0.
    pub(crate) fn run_out(&mut self, fabric: &Fabric, shards: &[Shard]) -> Result<(), Error> {
        while self.others_go_on(fabric)? {
            self.open(fabric);
            self.finish_microbatch(fabric, shards)?;
        }
        Ok(())
    }

    /// Whether there is another microbatch, though this rank has none.
    fn others_go_on(&mut self, fabric: &Fabric) -> Result<bool, Error> {
        match self.microbatches {
            Some(count) => Ok(fabric.options.uneven == Uneven::ZeroWeight && self.finished < count),
            None => {
                self.ask_for_microbatch(fabric, Input::Exhausted)?;
                Ok(self.ended.is_none())
            }
        }
    }

    /// Exchanges headers about the next microbatch, unless the step was found to have no other.
    fn ask_for_microbatch(&mut self, fabric: &Fabric, input: Input) -> Result<(), Error> {
        if self.ended.is_some() {
            return Ok(());
        }
        let tag = fabric.tag(None, Stage::Header, self.number(), self.finished);
        let said = fabric.control.all_gather(tag, microbatch_header::encode(input))?.wait()?;
        let supply = microbatch_header::decode(&said, fabric.rank())?;
        match supply.course(fabric.options.uneven) {
            Some(Course::Goes) => fabric.world.set_absent(&supply.exhausted),
            Some(Course::Ends) => {
                fabric.world.set_absent(&self.absent);
                self.ended = Some(supply);
            }
            None => {
                let (step, microbatch) = (self.number(), Some(self.finished));
                return Err(Error::UnevenInputs { step, microbatch, supply });
            }
        }
        Ok(())
    }

    /// Refuses to finish a step in the middle of a microbatch.
    pub(crate) fn check_closed(&self, fabric: &Fabric) -> Result<(), Error> {
        if self.open.is_none() {
            return Ok(());
        }
        let what = format!("microbatch {} was begun and not finished", self.finished);
        Err(fabric.misuse("finish", self.number(), what))
    }

    /// Refuses to finish a step that is not complete.
    pub(crate) fn check_complete(&self, fabric: &Fabric) -> Result<(), Error> {
        let refuse = |what: String| Err(fabric.misuse("finish", self.number(), what));
        match (self.microbatches, &self.ended) {
            (None, Some(supply)) if self.finished == 0 => {
                let (step, microbatch, supply) = (self.number(), Some(0), supply.clone());
                Err(Error::EndOfData { step, microbatch, supply })
            }
            (Some(count), _) if count != self.finished => refuse(format!(
                "{} microbatches done, the step was begun with {count}",
                self.finished
            )),
            _ => Ok(()),
        }
    }
}
