//! The bounds of untrusted JSON. Each is checked before memory is taken for the value.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_json::value::RawValue;

/// The most bytes of JSON text of the value `user` that a program saves, of its optimizer's
/// options, and of the settings of its model.
///
/// In memory such a value takes up to 90 times the bytes of its text.
pub const MOST_USER_BYTES: usize = 4 << 20;

/// The most bytes of JSON text of an optimizer: 250,000 counts of updates.
const MOST_OPTIMIZER_BYTES: usize = 16 << 20;

/// The most dims of a tensor, as in NumPy.
const MOST_DIMS: usize = 64;

/// Reads a value of any form, of at most [`MOST_USER_BYTES`].
pub(crate) fn value<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Value, D::Error> {
    bounded(deserializer, MOST_USER_BYTES)
}

/// Reads a value as [`value`] does, if it is there.
pub(crate) fn optional_value<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Value>, D::Error> {
    value(deserializer).map(Some)
}

/// Reads an optimizer, of at most [`MOST_OPTIMIZER_BYTES`].
pub(crate) fn optimizer<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    bounded(deserializer, MOST_OPTIMIZER_BYTES)
}

fn bounded<'de, D, T>(deserializer: D, most: usize) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    let text = <&RawValue>::deserialize(deserializer)?.get();
    if text.len() > most {
        let problem = format!("a value has {} bytes of JSON, more than {most}", text.len());
        return Err(D::Error::custom(problem));
    }
    serde_json::from_str(text).map_err(D::Error::custom)
}

/// Reads the shape of a tensor, of at most [`MOST_DIMS`].
pub(crate) fn shape<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    deserializer.deserialize_seq(ShapeVisitor(PhantomData))
}

struct ShapeVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ShapeVisitor<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the sizes of at most {MOST_DIMS} dims")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Vec<T>, A::Error> {
        let mut sizes = Vec::new();
        while let Some(size) = elements.next_element()? {
            if sizes.len() == MOST_DIMS {
                return Err(A::Error::custom(format!("a tensor has more than {MOST_DIMS} dims")));
            }
            sizes.push(size);
        }
        Ok(sizes)
    }
}

/// Reads a map, and refuses a name that is there twice.
pub(crate) fn unique<'de, D, T>(deserializer: D) -> Result<BTreeMap<String, T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    deserializer.deserialize_map(UniqueVisitor(PhantomData))
}

/// Reads settings, of at most [`MOST_USER_BYTES`], and refuses a name that is there twice.
pub(crate) fn settings<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, String>, D::Error> {
    #[derive(Deserialize)]
    struct Settings(#[serde(deserialize_with = "unique")] BTreeMap<String, String>);

    bounded(deserializer, MOST_USER_BYTES).map(|Settings(settings)| settings)
}

/// Reads a list of names, and refuses one that is there twice.
pub(crate) fn names<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeSet<String>, D::Error> {
    deserializer.deserialize_seq(NamesVisitor)
}

struct NamesVisitor;

impl<'de> Visitor<'de> for NamesVisitor {
    type Value = BTreeSet<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of names")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut names: A) -> Result<Self::Value, A::Error> {
        let mut set = BTreeSet::new();
        while let Some(name) = names.next_element::<String>()? {
            if let Some(twice) = set.replace(name) {
                let problem = format!("`{}` is there twice", twice.escape_debug());
                return Err(A::Error::custom(problem));
            }
        }
        Ok(set)
    }
}

struct UniqueVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for UniqueVisitor<T> {
    type Value = BTreeMap<String, T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
        let mut map = BTreeMap::new();
        while let Some((name, value)) = entries.next_entry::<String, T>()? {
            insert(&mut map, name, value)?;
        }
        Ok(map)
    }
}

/// Adds an entry of a map.
///
/// # Errors
/// If the name is there already.
pub(crate) fn insert<T, E: serde::de::Error>(
    map: &mut BTreeMap<String, T>,
    name: String,
    value: T,
) -> Result<(), E> {
    if map.contains_key(&name) {
        return Err(E::custom(format!("`{}` is there twice", name.escape_debug())));
    }
    map.insert(name, value);
    Ok(())
}
