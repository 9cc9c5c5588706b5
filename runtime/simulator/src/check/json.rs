//! Schedules as JSON. CHECK.md, "The format".

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::num::{NonZero, NonZeroU32};

use hsdp_sharding::Rank;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::ser::SerializeStruct;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;

use super::schedules::{
    Issue, ListedAction, ListedHost, MAX_ACTIONS, MAX_COMMUNICATORS, MAX_RANKS,
    ScheduledCommunicator, Schedules, refused,
};
use crate::Error;

/// A file of schedules, with actions of some type.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[serde(bound(deserialize = "A: Deserialize<'de> + JsonItem"))]
struct ScheduleFile<A> {
    communicators: CommunicatorEntries,
    kernels: u32,
    schedules: JsonList<JsonList<A>>,
    #[serde(default, rename = "mesh")]
    _mesh: IgnoredAny,
    #[serde(default, rename = "expected")]
    _expected: IgnoredAny,
}

/// Names in their order, each with its ranks; a name may come twice.
struct CommunicatorEntries(Vec<(String, Vec<u32>)>);

/// A list that is refused while it is read, as soon as it has too many items.
struct JsonList<T>(Vec<T>);

/// An item of a [`JsonList`].
trait JsonItem {
    /// Names the list in errors.
    const LIST: &'static str;
    /// Names the items in errors.
    const ITEMS: &'static str;
    /// Maximum number of items.
    const MOST: usize;
}

/// An action.
#[derive(Serialize)]
#[serde(untagged)]
enum JsonAction<'a> {
    Issue { comm: Cow<'a, str>, op: Cow<'a, str>, dtype: Cow<'a, str>, count: u64, stream: u64 },
    Wait { wait: usize },
}

/// An action that was read to check it, and dropped.
struct CheckedAction;

/// A word of the text, which is borrowed unless it has escapes.
#[derive(Deserialize)]
struct Word<'a>(#[serde(borrow)] Cow<'a, str>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ActionFields<'a> {
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

/// A value that JSON has as an object with its fields. The derived code alone takes a list of the
/// fields' values, too.
struct JsonObject<T>(T);

impl Schedules {
    /// Reads schedules from JSON. The fields `mesh` and `expected` may have any content, which is
    /// skipped.
    ///
    /// # Errors
    /// [`Error::Schedules`] with the place in the JSON: it is not JSON, a field is missing, unknown
    /// or of another type, or any refusal of the other methods.
    pub fn from_json(text: &str) -> Result<Self, Error> {
        // The first reading keeps no action, and the second one 16 bytes for each.
        read::<CheckedAction>(text)?;
        let ScheduleFile { communicators, kernels, schedules: lists, .. } =
            read::<&RawValue>(text)?;
        let mut schedules = Self::new(lists.0.len(), NonZeroU32::new(kernels))?;
        for (name, ranks) in communicators.0 {
            let ranks: Vec<Rank> = ranks.iter().map(|rank| Rank::new(*rank as usize)).collect();
            schedules.communicator(&name, &ranks)?;
        }
        for (rank, actions) in lists.0.iter().enumerate() {
            for action in &actions.0 {
                schedules.act(Rank::new(rank), action.get())?;
            }
        }
        Ok(schedules)
    }

    fn act(&mut self, rank: Rank, action: &str) -> Result<(), Error> {
        let wrong = |error: serde_json::Error| refused(self.place(rank), error.to_string());
        match serde_json::from_str(action).map_err(wrong)? {
            JsonAction::Wait { wait } => self.wait(rank, wait),
            JsonAction::Issue { comm, op, dtype, count, stream } => {
                let unknown =
                    || refused(self.place(rank), format!("there is no communicator {comm:?}"));
                let communicator = self.find(&comm).ok_or_else(unknown)?;
                let issue = Issue { communicator, op: &op, dtype: &dtype, count, stream };
                self.issue(rank, issue).map(drop)
            }
        }
    }

    /// Returns the schedules as JSON, which [`from_json`](Self::from_json) reads. It does not tell
    /// that a world was cut off.
    ///
    /// # Panics
    /// Never: JSON can represent all schedules.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("numbers, names and lists")
    }

    fn json_action(&self, action: &ListedAction) -> JsonAction<'_> {
        match *action {
            ListedAction::Wait { index, .. } => JsonAction::Wait { wait: index },
            ListedAction::Issue { operation, call, stream } => {
                let communicator = self.operations[operation as usize].communicator;
                let call = &self.calls[call as usize];
                JsonAction::Issue {
                    comm: (&self.communicators[communicator as usize].name).into(),
                    op: (&call.op).into(),
                    dtype: (&call.dtype).into(),
                    count: call.count,
                    stream: self.streams[stream as usize].1,
                }
            }
        }
    }
}

/// Reads a file. An error has its place, which takes longer to read.
fn read<'a, A: Deserialize<'a> + JsonItem>(text: &'a str) -> Result<ScheduleFile<A>, Error> {
    let placed = |error: serde_json::Error| {
        let mut json = serde_json::Deserializer::from_str(text);
        match serde_path_to_error::deserialize::<_, JsonObject<ScheduleFile<CheckedAction>>>(
            &mut json,
        ) {
            Ok(_) => refused("", error.to_string()),
            Err(error) => refused(error.path().to_string(), error.into_inner().to_string()),
        }
    };
    serde_json::from_str(text).map(|JsonObject(file)| file).map_err(placed)
}

impl JsonItem for CheckedAction {
    const LIST: &'static str = "a list of actions";
    const ITEMS: &'static str = "actions";
    const MOST: usize = MAX_ACTIONS;
}

impl JsonItem for &RawValue {
    const LIST: &'static str = CheckedAction::LIST;
    const ITEMS: &'static str = CheckedAction::ITEMS;
    const MOST: usize = CheckedAction::MOST;
}

impl<A> JsonItem for JsonList<A> {
    const LIST: &'static str = "a list of actions for each rank";
    const ITEMS: &'static str = "ranks";
    const MOST: usize = MAX_RANKS;
}

impl<'de> Deserialize<'de> for CheckedAction {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        JsonAction::deserialize(deserializer).map(|_| Self)
    }
}

impl<'de> Deserialize<'de> for JsonAction<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let JsonObject(fields) = JsonObject::deserialize(deserializer)?;
        let ActionFields { comm, op, dtype, count, stream, wait } = fields;
        let missing = |field| D::Error::custom(format_args!("`{field}` is missing"));
        let has_word = comm.is_some() || op.is_some() || dtype.is_some();
        match wait {
            Some(wait) if !has_word && count.is_none() && stream.is_none() => {
                Ok(Self::Wait { wait })
            }
            Some(_) => Err(D::Error::custom("a wait has no other field")),
            None => Ok(Self::Issue {
                comm: comm.ok_or_else(|| missing("comm"))?.0,
                op: op.ok_or_else(|| missing("op"))?.0,
                dtype: dtype.ok_or_else(|| missing("dtype"))?.0,
                count: count.ok_or_else(|| missing("count"))?,
                stream: stream.ok_or_else(|| missing("stream"))?,
            }),
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for JsonObject<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ObjectVisitor<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
            type Value = JsonObject<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<JsonObject<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(JsonObject)
            }
        }

        deserializer.deserialize_map(ObjectVisitor(PhantomData))
    }
}

impl<'de, T: Deserialize<'de> + JsonItem> Deserialize<'de> for JsonList<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ListVisitor<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de> + JsonItem> Visitor<'de> for ListVisitor<T> {
            type Value = JsonList<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(T::LIST)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<JsonList<T>, A::Error> {
                let mut list = Vec::new();
                while let Some(item) = seq.next_element()? {
                    check_room::<A::Error>(list.len(), T::MOST, T::ITEMS)?;
                    list.push(item);
                }
                Ok(JsonList(list))
            }
        }

        deserializer.deserialize_seq(ListVisitor(PhantomData))
    }
}

impl<'de> Deserialize<'de> for CommunicatorEntries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntriesVisitor;

        impl<'de> Visitor<'de> for EntriesVisitor {
            type Value = CommunicatorEntries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of ranks for each name")
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> Result<CommunicatorEntries, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    check_room::<A::Error>(entries.len(), MAX_COMMUNICATORS, "communicators")?;
                    entries.push(entry);
                }
                Ok(CommunicatorEntries(entries))
            }
        }

        deserializer.deserialize_map(EntriesVisitor)
    }
}

/// Refuses one more item than `most`.
fn check_room<E: serde::de::Error>(count: usize, most: usize, items: &str) -> Result<(), E> {
    if count < most { Ok(()) } else { Err(E::custom(format_args!("more than {most} {items}"))) }
}

impl Serialize for Schedules {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let lists: Vec<_> = self.hosts.iter().map(|host| HostActions(self, host)).collect();
        let mut file = serializer.serialize_struct("Schedules", 3)?;
        file.serialize_field("communicators", &RanksByName(&self.communicators))?;
        file.serialize_field("kernels", &self.kernels.map_or(0, NonZero::get))?;
        file.serialize_field("schedules", &lists)?;
        file.end()
    }
}

struct RanksByName<'a>(&'a [ScheduledCommunicator]);

impl Serialize for RanksByName<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|it| (&it.name, &it.ranks)))
    }
}

struct HostActions<'a>(&'a Schedules, &'a ListedHost);

impl Serialize for HostActions<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.1.actions.iter().map(|action| self.0.json_action(action)))
    }
}
