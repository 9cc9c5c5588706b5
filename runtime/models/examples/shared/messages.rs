//! The messages of a step: the most that any step of any rank had.

use hsdp::comm::Messages;
use hsdp::{Channel, Tag, World};
use serde_json::{Value, json};

use super::failure::Failure;

/// The messages of the steps of one rank. Those between steps do not count.
#[derive(Debug, Default)]
pub(crate) struct StepMessages {
    before: Messages,
    most: Messages,
}

impl StepMessages {
    /// A step begins.
    pub(crate) fn begin(&mut self, world: &World) {
        self.before = world.messages();
    }

    /// The step has ended.
    pub(crate) fn end(&mut self, world: &World) {
        self.most = self.most.most(world.messages() - self.before);
    }

    /// The most of all ranks. **Collective** over the world.
    ///
    /// # Errors
    /// Those of an all-gather.
    pub(crate) fn most_of_all(&self, world: &World) -> Result<Messages, Failure> {
        let Messages { data, control, background, forwarded } = self.most;
        let group = world.world_group(Channel::User);
        let own = vec![data, control, background, forwarded];
        let all = group.all_gather(Tag::default(), own).and_then(|pending| pending.wait());
        let all = all.map_err(hsdp::Error::from)?;
        let of = |counts: &[u64; 4]| {
            let [data, control, background, forwarded] = *counts;
            Messages { data, control, background, forwarded }
        };
        Ok(all.as_chunks().0.iter().map(of).fold(self.most, Messages::most))
    }
}

/// For `summary.json`.
pub(crate) fn messages_summary(messages: Messages) -> Value {
    let Messages { data, control, background, forwarded } = messages;
    json!({ "data": data, "control": control, "background": background, "forwarded": forwarded })
}
