//! Schedules, written as JSON.

use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

use super::lists::Listed;
use crate::check::schedules::{Action, Host, Schedules};

impl Schedules {
    /// Returns the schedules as JSON, which [`from_json`](Self::from_json) reads. That a world was
    /// cut off is not in it.
    ///
    /// # Panics
    /// Never: JSON can represent all schedules.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("numbers, names and lists")
    }

    fn listed(&self, action: &Action) -> Listed<&str> {
        let (operation, call, stream) = match *action {
            Action::Wait { index, .. } => return Listed::Wait { wait: index },
            Action::Issue { operation, call, stream } => (operation, call, stream),
        };
        let communicator = self.operations[operation as usize].communicator;
        let (call, (_, stream)) = (&self.calls[call as usize], self.streams[stream as usize]);
        Listed::Issue {
            comm: &self.communicators[communicator as usize].name,
            op: &call.op,
            dtype: &call.dtype,
            count: call.count,
            stream,
        }
    }
}

impl Serialize for Schedules {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut file = serializer.serialize_struct("Schedules", 3)?;
        file.serialize_field("communicators", &Communicators(self))?;
        file.serialize_field("kernels", &self.kernels.map_or(0, std::num::NonZero::get))?;
        file.serialize_field("schedules", &Lists(self))?;
        file.end()
    }
}

struct Communicators<'a>(&'a Schedules);

impl Serialize for Communicators<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.communicators.iter().map(|it| (&it.name, &it.ranks)))
    }
}

struct Lists<'a>(&'a Schedules);

impl Serialize for Lists<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.hosts.iter().map(|host| List(self.0, host)))
    }
}

struct List<'a>(&'a Schedules, &'a Host);

impl Serialize for List<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.1.actions.iter().map(|action| self.0.listed(action)))
    }
}
