//! Counts the messages of steps, and keeps the maximum over the steps and ranks.

use hsdp::comm::Messages;
use hsdp::{Channel, Tag, World};
use serde_json::{Value, json};

use crate::failure::Failure;

/// Messages that one rank sends in steps. Messages between steps do not count.
#[derive(Debug, Default)]
pub(crate) struct StepMessages {
    before: Messages,
    most: Messages,
}

impl StepMessages {
    /// Begins a step.
    pub(crate) fn begin(&mut self, world: &World) {
        self.before = world.messages();
    }

    /// Ends a step.
    pub(crate) fn end(&mut self, world: &World) {
        self.most = self.most.most(world.messages() - self.before);
    }

    /// Returns the maximum over all ranks, for `summary.json`. Collective.
    ///
    /// # Errors
    /// Errors of an all-gather.
    pub(crate) fn summary(&self, world: &World) -> Result<Value, Failure> {
        let Messages { data, control, background, forwarded } = self.most;
        let group = world.world_group(Channel::User);
        let own = vec![data, control, background, forwarded];
        let all = group.all_gather(Tag::default(), own)?.wait()?;
        let of = |counts: &[u64; 4]| {
            let [data, control, background, forwarded] = *counts;
            Messages { data, control, background, forwarded }
        };
        let most = all.as_chunks().0.iter().map(of).fold(self.most, Messages::most);
        let Messages { data, control, background, forwarded } = most;
        Ok(json!({
            "data": data, "control": control, "background": background, "forwarded": forwarded,
        }))
    }
}
