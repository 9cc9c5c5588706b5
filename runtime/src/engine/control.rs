//! What ranks tell each other on the control channel: a few words each, in buffers that serve one exchange after the other.

use std::mem;

use hsdp_comm::{Error, Group, Lent, Tag};
use parking_lot::Mutex;

/// The control channel of one rank.
#[derive(Debug)]
pub(crate) struct Control {
    group: Group,
    said: Mutex<Vec<u64>>,
    heard: Mutex<Vec<u64>>,
}

impl Control {
    /// On a group of all ranks.
    pub(crate) fn new(group: Group) -> Self {
        Self { group, said: Mutex::default(), heard: Mutex::default() }
    }

    /// All ranks, for what is no exchange.
    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    /// Says `words`, as many as every rank says, and has `hear` what all have said, in rank order. Collective over the world.
    ///
    /// # Errors
    /// Those of an all-gather.
    pub(crate) fn exchange<R>(
        &self,
        tag: Tag,
        words: impl IntoIterator<Item = u64>,
        hear: impl FnOnce(&[u64]) -> R,
    ) -> Result<R, Error> {
        let [mut source, mut target] =
            [&self.said, &self.heard].map(|buffer| mem::take(&mut *buffer.lock()));
        source.clear();
        source.extend(words);
        target.resize(source.len() * self.group.size(), 0);
        let lent = self.group.all_gather_into(tag, Lent { source, target })?.wait()?;
        let heard = hear(&lent.target);
        *self.said.lock() = lent.source;
        *self.heard.lock() = lent.target;
        Ok(heard)
    }
}
