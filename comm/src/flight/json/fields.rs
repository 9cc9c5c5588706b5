//! How the fields of a record are written: enums by their names, ranks and groups by their numbers.

use std::fmt;

use hsdp_kernels::{Divisor, Wire};
use hsdp_sharding::{DType, Rank, UnitId};
use serde::de::{Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::flight::record::FlightState;
use crate::{Channel, GroupId, Op, Reduction, Stage};

/// What is written by its name.
pub(in crate::flight) trait Named: Copy + 'static {
    const WHAT: &'static str;
    const ALL: &'static [Self];
    fn name(self) -> &'static str;
}

macro_rules! named {
    ($($name:ident: $what:literal),*) => {
        $(impl Named for $name {
            const WHAT: &'static str = $what;
            const ALL: &'static [Self] = &Self::ALL;

            fn name(self) -> &'static str {
                Self::name(self)
            }
        })*
    };
}

named!(
    Channel: "a channel", DType: "a dtype", FlightState: "a state", Op: "an operation", Reduction: "a reduction",
    Stage: "a stage"
);

/// Reads a name.
struct Name<T>(std::marker::PhantomData<T>);

impl<T: Named> Visitor<'_> for Name<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::WHAT)
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<T, E> {
        let named = T::ALL.iter().find(|it| it.name() == text);
        named.copied().ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
    }
}

pub(in crate::flight) mod name {
    use super::{Deserializer, Name, Named, Serializer};

    pub(in crate::flight) fn serialize<T: Named, S: Serializer>(
        value: &T,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(value.name())
    }

    pub(in crate::flight) fn deserialize<'de, T: Named, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<T, D::Error> {
        deserializer.deserialize_str(Name(std::marker::PhantomData))
    }
}

/// A named value within an option.
#[derive(Serialize, Deserialize)]
#[serde(transparent)]
struct ByName<T: Named>(#[serde(with = "name")] T);

pub(in crate::flight) mod optional_name {
    use super::{ByName, Deserialize as _, Deserializer, Named, Serialize as _, Serializer};

    pub(in crate::flight) fn serialize<T: Named, S: Serializer>(
        value: &Option<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value.map(ByName).serialize(serializer)
    }

    pub(in crate::flight) fn deserialize<'de, T: Named, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<T>, D::Error> {
        Ok(Option::<ByName<T>>::deserialize(deserializer)?.map(|ByName(value)| value))
    }
}

fn rank_of(number: u32) -> Rank {
    Rank::new(number as usize)
}

pub(in crate::flight) mod rank {
    use super::{Deserialize as _, Deserializer, Rank, Serializer, rank_of};

    pub(in crate::flight) fn serialize<S: Serializer>(
        rank: &Rank,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_u32(rank.get())
    }

    pub(in crate::flight) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Rank, D::Error> {
        u32::deserialize(deserializer).map(rank_of)
    }

    pub(in crate::flight) mod optional {
        use super::super::Serialize as _;
        use super::{Deserializer, Rank, Serializer, rank_of};
        use serde::Deserialize as _;

        pub(in crate::flight) fn serialize<S: Serializer>(
            rank: &Option<Rank>,
            serializer: S,
        ) -> Result<S::Ok, S::Error> {
            rank.map(Rank::get).serialize(serializer)
        }

        pub(in crate::flight) fn deserialize<'de, D: Deserializer<'de>>(
            deserializer: D,
        ) -> Result<Option<Rank>, D::Error> {
            Ok(Option::<u32>::deserialize(deserializer)?.map(rank_of))
        }
    }
}

pub(in crate::flight) mod ranks {
    use super::{Deserialize as _, Deserializer, Rank, Serializer, rank_of};

    pub(in crate::flight) fn serialize<S: Serializer>(
        ranks: &[Rank],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(ranks.iter().map(|rank| rank.get()))
    }

    pub(in crate::flight) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<Rank>, D::Error> {
        Ok(Vec::<u32>::deserialize(deserializer)?.into_iter().map(rank_of).collect())
    }
}

/// In hexadecimal, as it is displayed: readers in other languages would round a number of 64 bits.
pub(in crate::flight) mod group_id {
    use super::{Deserialize as _, Deserializer, GroupId, Serializer, Unexpected};
    use serde::de::Error as _;

    pub(in crate::flight) fn serialize<S: Serializer>(
        id: &GroupId,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_str(id)
    }

    pub(in crate::flight) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<GroupId, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        let id = u64::from_str_radix(&text, 16).map(GroupId::from_hash);
        let expected = &"a group as 16 hexadecimal digits";
        id.map_err(|_| D::Error::invalid_value(Unexpected::Str(&text), expected))
    }
}

#[derive(Serialize, Deserialize)]
struct Scaling {
    #[serde(with = "name")]
    wire: DType,
    pre: f32,
    post: f32,
}

pub(in crate::flight) mod scaling {
    use super::{
        Deserialize as _, Deserializer, Divisor, Scaling, Serialize as _, Serializer, Wire,
    };
    use serde::de::Error as _;

    pub(in crate::flight) fn serialize<S: Serializer>(
        scaling: &Option<crate::Scaling>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let written = |it: crate::Scaling| Scaling {
            wire: it.wire.dtype(),
            pre: it.pre.value(),
            post: it.post.value(),
        };
        scaling.map(written).serialize(serializer)
    }

    pub(in crate::flight) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<crate::Scaling>, D::Error> {
        let Some(read) = Option::<Scaling>::deserialize(deserializer)? else { return Ok(None) };
        let Scaling { wire, pre, post } = read;
        let divisor = |value| Divisor::new(value).map_err(D::Error::custom);
        let wire = Wire::try_from(wire).map_err(D::Error::custom)?;
        Ok(Some(crate::Scaling { wire, pre: divisor(pre)?, post: divisor(post)? }))
    }
}

#[derive(Serialize, Deserialize)]
struct Tag {
    #[serde(with = "name")]
    stage: Stage,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    unit: Option<u32>,
    step: u64,
    microbatch: usize,
}

pub(in crate::flight) mod tag {
    use super::{Deserialize as _, Deserializer, Serialize as _, Serializer, Tag, UnitId};

    pub(in crate::flight) fn serialize<S: Serializer>(
        tag: &crate::Tag,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let crate::Tag { unit, stage, step, microbatch } = *tag;
        Tag { stage, unit: unit.map(UnitId::get), step, microbatch }.serialize(serializer)
    }

    pub(in crate::flight) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<crate::Tag, D::Error> {
        let Tag { stage, unit, step, microbatch } = Tag::deserialize(deserializer)?;
        let unit = unit.map(|unit| UnitId::new(unit as usize));
        Ok(crate::Tag { unit, stage, step, microbatch })
    }
}
