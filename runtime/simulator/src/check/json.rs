//! Schedules as JSON. CHECK.md, "The format".

mod lists;
mod object;
mod write;

use std::fmt;
use std::num::NonZeroU32;

use hsdp_sharding::Rank;
use serde::de::{Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use self::lists::{Listed, Lists};
use self::object::Object;
use super::schedules::{Issue, MAX_COMMUNICATORS, Schedules, refused};
use crate::Error;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    communicators: Communicators,
    kernels: u32,
    schedules: Lists,
    #[serde(default, rename = "mesh")]
    _mesh: IgnoredAny,
    #[serde(default, rename = "expected")]
    _expected: IgnoredAny,
}

/// Names in their order, each with its ranks; a name may come twice.
struct Communicators(Vec<(String, Vec<u32>)>);

impl Schedules {
    /// Reads schedules from JSON. The fields `mesh` and `expected` may have any content, which is
    /// skipped.
    ///
    /// # Errors
    /// [`Error::Schedules`] with the place in the JSON: it is not JSON, a field is missing, unknown
    /// or of another type, or what the other methods refuse.
    pub fn from_json(text: &str) -> Result<Self, Error> {
        let Object(file): Object<File> =
            serde_json::from_str(text).map_err(|error| placed(text, &error))?;
        let lists = file.schedules;
        let mut schedules = Self::new(lists.ranks.len(), NonZeroU32::new(file.kernels))?;
        for (name, ranks) in file.communicators.0 {
            let ranks: Vec<Rank> = ranks.iter().map(|rank| Rank::new(*rank as usize)).collect();
            schedules.communicator(&name, &ranks)?;
        }
        for (rank, actions) in lists.ranks.iter().enumerate() {
            for action in actions {
                schedules.act(Rank::new(rank), action, &lists.words)?;
            }
        }
        Ok(schedules)
    }

    fn act(&mut self, rank: Rank, action: &Listed<usize>, words: &[String]) -> Result<(), Error> {
        let (comm, op, dtype, count, stream) = match *action {
            Listed::Wait { wait } => return self.wait(rank, wait),
            Listed::Issue { comm, op, dtype, count, stream } => (comm, op, dtype, count, stream),
        };
        let [comm, op, dtype] = [comm, op, dtype].map(|word| &*words[word]);
        let unknown = || refused(self.place(rank), format!("there is no communicator {comm:?}"));
        let communicator = self.find(comm).ok_or_else(unknown)?;
        self.issue(rank, Issue { communicator, op, dtype, count, stream })?;
        Ok(())
    }
}

/// Returns an error with its place, which takes longer to read.
fn placed(text: &str, error: &serde_json::Error) -> Error {
    let mut json = serde_json::Deserializer::from_str(text);
    match serde_path_to_error::deserialize::<_, Object<File>>(&mut json) {
        Ok(_) => refused("", error.to_string()),
        Err(error) => refused(error.path().to_string(), error.into_inner().to_string()),
    }
}

impl<'de> Deserialize<'de> for Communicators {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;

        impl<'de> Visitor<'de> for Names {
            type Value = Communicators;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of ranks for each name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Communicators, A::Error> {
                let mut communicators = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    if communicators.len() == MAX_COMMUNICATORS {
                        let problem = format!("more than {MAX_COMMUNICATORS} communicators");
                        return Err(A::Error::custom(problem));
                    }
                    communicators.push(entry);
                }
                Ok(Communicators(communicators))
            }
        }

        deserializer.deserialize_map(Names)
    }
}
