//! The lists of all ranks, as JSON has them: read one action at a time, so that no more of them are
//! held than there may be.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use serde::de::{DeserializeSeed, Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::object::Object;
use crate::check::schedules::{MAX_ACTIONS, MAX_RANKS};

/// The actions of each rank. Each word is kept once, and actions have its index.
#[derive(Default)]
pub(super) struct Lists {
    pub(super) ranks: Vec<Vec<Listed<usize>>>,
    pub(super) words: Vec<String>,
}

/// An action, with words of some type.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum Listed<W> {
    Issue { comm: W, op: W, dtype: W, count: u64, stream: u64 },
    Wait { wait: usize },
}

/// A word, of the text where it has no escapes.
#[derive(Deserialize)]
struct Word<'a>(#[serde(borrow)] Cow<'a, str>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields<'a> {
    #[serde(borrow)]
    comm: Option<Word<'a>>,
    #[serde(borrow)]
    op: Option<Word<'a>>,
    #[serde(borrow)]
    dtype: Option<Word<'a>>,
    count: Option<u64>,
    stream: Option<u64>,
    wait: Option<usize>,
}

impl<'a> Fields<'a> {
    fn listed(self) -> Result<Listed<Word<'a>>, String> {
        let Self { comm, op, dtype, count, stream, wait } = self;
        let missing = |field| format!("`{field}` is missing");
        let has_word = comm.is_some() || op.is_some() || dtype.is_some();
        match wait {
            Some(wait) if !has_word && count.is_none() && stream.is_none() => {
                Ok(Listed::Wait { wait })
            }
            Some(_) => Err("a wait has no other field".to_owned()),
            None => Ok(Listed::Issue {
                comm: comm.ok_or_else(|| missing("comm"))?,
                op: op.ok_or_else(|| missing("op"))?,
                dtype: dtype.ok_or_else(|| missing("dtype"))?,
                count: count.ok_or_else(|| missing("count"))?,
                stream: stream.ok_or_else(|| missing("stream"))?,
            }),
        }
    }
}

impl<'de> Deserialize<'de> for Listed<Word<'de>> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Object(fields) = Object::<Fields<'_>>::deserialize(deserializer)?;
        fields.listed().map_err(D::Error::custom)
    }
}

impl<'de> Deserialize<'de> for Lists {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(OfRanks)
    }
}

struct OfRanks;

impl<'de> Visitor<'de> for OfRanks {
    type Value = Lists;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of actions for each rank")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Lists, A::Error> {
        let (mut lists, mut known, mut actions) = (Lists::default(), HashMap::new(), 0);
        loop {
            let words = Words { known: &mut known, list: &mut lists.words };
            let of_rank = OfRank { words, actions: &mut actions };
            let Some(rank) = seq.next_element_seed(of_rank)? else { return Ok(lists) };
            check(lists.ranks.len() < MAX_RANKS, MAX_RANKS, "ranks")?;
            lists.ranks.push(rank);
        }
    }
}

/// Reads the list of one rank.
struct OfRank<'a> {
    words: Words<'a>,
    /// The number of actions of all ranks so far.
    actions: &'a mut usize,
}

impl<'de> DeserializeSeed<'de> for OfRank<'_> {
    type Value = Vec<Listed<usize>>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for OfRank<'_> {
    type Value = Vec<Listed<usize>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of actions")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut list = Vec::new();
        while let Some(listed) = seq.next_element::<Listed<Word<'_>>>()? {
            *self.actions += 1;
            check(*self.actions <= MAX_ACTIONS, MAX_ACTIONS, "actions")?;
            list.push(match listed {
                Listed::Wait { wait } => Listed::Wait { wait },
                Listed::Issue { comm, op, dtype, count, stream } => {
                    let [comm, op, dtype] = [comm, op, dtype].map(|word| self.words.index(word));
                    Listed::Issue { comm, op, dtype, count, stream }
                }
            });
        }
        Ok(list)
    }
}

fn check<E: Error>(is_allowed: bool, most: usize, what: &str) -> Result<(), E> {
    if is_allowed { Ok(()) } else { Err(E::custom(format_args!("more than {most} {what}"))) }
}

/// The words so far.
struct Words<'a> {
    known: &'a mut HashMap<String, usize>,
    list: &'a mut Vec<String>,
}

impl Words<'_> {
    fn index(&mut self, Word(word): Word<'_>) -> usize {
        if let Some(index) = self.known.get(&*word) {
            return *index;
        }
        self.list.push(word.to_string());
        self.known.insert(word.into_owned(), self.list.len() - 1);
        self.list.len() - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_actions_are_read_than_there_may_be() {
        let read = |before: usize| {
            let (mut known, mut list, mut actions) = (HashMap::new(), Vec::new(), before);
            let words = Words { known: &mut known, list: &mut list };
            let mut json = serde_json::Deserializer::from_str(r#"[{"wait": 0}, {"wait": 0}]"#);
            OfRank { words, actions: &mut actions }.deserialize(&mut json).map(|list| list.len())
        };
        assert_eq!(read(MAX_ACTIONS - 2).expect("as many as may be"), 2);
        let error = read(MAX_ACTIONS - 1).expect_err("one more").to_string();
        assert!(error.starts_with("more than 4194304 actions"), "{error}");
    }
}
