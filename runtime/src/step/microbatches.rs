//! The number of microbatches of a step: as its options say, or as long as ranks have data. PROTOCOL.md, "A step".

use std::mem;

use hsdp_comm::Stage;
use hsdp_sharding::step::Course;

use crate::agree::microbatch_header;
use crate::error::Error;
use crate::options::uneven::{Input, Uneven};
use crate::state::context::Context;
use crate::state::shard::Shard;
use crate::step::step_state::{More, OpenMicrobatch, StepState, Token};

/// The step has no other microbatch, since ranks have no more data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NoMore;

impl StepState {
    pub(crate) fn begin_microbatch(
        &mut self,
        context: &Context,
    ) -> Result<Result<Token, NoMore>, Error> {
        let refuse = |what: String| Err(context.misuse("microbatch", self.number(), what));
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
            self.ask_for_microbatch(context, Input::Ready)?;
        }
        if self.more == More::Over {
            return Ok(Err(NoMore));
        }
        self.open(context);
        Ok(Ok(Token { opened: self.opened, microbatch: self.finished }))
    }

    fn open(&mut self, context: &Context) {
        let number = self.number();
        self.gathers.begin(context, number, self.finished);
        self.reductions.begin_microbatch();
        self.open = Some(OpenMicrobatch { loss: None });
    }

    /// Goes through the microbatches that other ranks still bring, with weight 0.
    pub(crate) fn run_out(&mut self, context: &Context, shards: &[Shard]) -> Result<(), Error> {
        while self.others_go_on(context)? {
            self.open(context);
            self.finish_microbatch(context, shards)?;
        }
        Ok(())
    }

    /// Whether there is another microbatch, though this rank has none.
    fn others_go_on(&mut self, context: &Context) -> Result<bool, Error> {
        match self.microbatches {
            Some(count) => {
                Ok(context.options.uneven == Uneven::ZeroWeight && self.finished < count)
            }
            None => {
                self.ask_for_microbatch(context, Input::Exhausted)?;
                Ok(self.more == More::MayFollow)
            }
        }
    }

    /// Exchanges headers about the next microbatch, unless the step was found to have no other.
    fn ask_for_microbatch(&mut self, context: &Context, input: Input) -> Result<(), Error> {
        if self.more == More::Over {
            return Ok(());
        }
        let tag = context.tag(None, Stage::Header, self.number(), self.finished);
        let before = mem::take(&mut self.supply);
        let decode = |said: &[u64]| microbatch_header::decode(said, context.rank(), before);
        let supply =
            context.control.exchange_in_step(tag, microbatch_header::encode(input), decode)??;
        match supply.course(context.options.uneven) {
            Some(Course::Goes) => context.world.set_absent(&supply.exhausted),
            Some(Course::Ends) => {
                context.world.set_absent(&self.absent);
                self.more = More::Over;
            }
            None => {
                let (step, microbatch) = (self.number(), Some(self.finished));
                return Err(Error::UnevenInputs { step, microbatch, supply });
            }
        }
        self.supply = supply;
        Ok(())
    }

    /// The error that says that there is no other microbatch.
    pub(crate) fn end_of_data(&self) -> Error {
        let (step, supply) = (self.number(), self.supply.clone());
        Error::EndOfData { step, microbatch: Some(self.finished), supply }
    }

    /// Refuses to finish a step in the middle of a microbatch.
    pub(crate) fn check_closed(&self, context: &Context) -> Result<(), Error> {
        if self.open.is_none() {
            return Ok(());
        }
        let what = format!("microbatch {} was begun and not finished", self.finished);
        Err(context.misuse("finish", self.number(), what))
    }

    /// Refuses to finish a step that is not complete.
    pub(crate) fn check_complete(&self, context: &Context) -> Result<(), Error> {
        let refuse = |what: String| Err(context.misuse("finish", self.number(), what));
        match (self.microbatches, self.more) {
            (None, More::Over) if self.finished == 0 => Err(self.end_of_data()),
            (Some(count), _) if count != self.finished => refuse(format!(
                "{} microbatches are done, the step was begun with {count}",
                self.finished
            )),
            _ => Ok(()),
        }
    }
}
