//! Machine files: TOML that is read and written.

use std::fmt::Write;

use serde::Deserialize;

use super::quantity::{NumberMut, Quantity, text};
use super::sections::{Calls, Compute, DeviceHost, Links, Memory, Threads};
use super::unit::Count;
use super::{Device, Kind, Machine};
use crate::{Error, bundled};

/// A machine file, as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: String,
    kind: KindName,
    ranks: Quantity<Count>,
    memory: Memory,
    compute: Compute,
    calls: Calls,
    threads: Option<Threads>,
    host: Option<DeviceHost>,
    links: Option<Links>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum KindName {
    Device,
    Host,
}

impl Machine {
    /// The names of the bundled machines.
    pub const BUNDLED: [&str; bundled::NAMES.len()] = bundled::NAMES;

    /// Returns the bundled machine of that name.
    ///
    /// # Errors
    /// [`Error::UnknownMachine`]
    pub fn bundled(name: &str) -> Result<Self, Error> {
        let unknown = || Error::UnknownMachine { name: name.to_owned() };
        Self::from_toml(bundled::file(name).ok_or_else(unknown)?)
    }

    /// Reads a machine file.
    ///
    /// # Errors
    /// [`Error::MachineFile`], with the line and the key, if the text is no TOML, if a number is missing, unknown, without a unit or a source, or
    /// physically impossible, or if a table does not belong to the machine's kind.
    pub fn from_toml(text: &str) -> Result<Self, Error> {
        let syntax = |error: toml::de::Error| problem(text, String::new(), &error);
        let deserializer = toml::Deserializer::parse(text).map_err(syntax)?;
        let file: Result<File, _> = serde_path_to_error::deserialize(deserializer);
        file.map_err(|error| problem(text, error.path().to_string(), error.inner()))?.machine()
    }

    /// The machine as a file: [`from_toml`](Self::from_toml) reads it as the same machine.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let kind = if self.device().is_some() { "device" } else { "host" };
        let mut lines = format!("name = {}\nkind = \"{kind}\"\n", quoted(&self.name));
        let mut last = String::new();
        self.clone().visit(&mut |NumberMut { name, value, source, unit }| {
            let (table, key) = name.rsplit_once('.').unwrap_or(("", &name));
            if table != last {
                let _ = writeln!(lines, "\n[{table}]");
                last = table.to_owned();
            }
            let (value, source) = (quoted(&text(*value, &unit)), quoted(source));
            let _ = writeln!(lines, "{key} = {{ value = {value}, source = {source} }}");
        });
        lines
    }
}

impl File {
    fn machine(self) -> Result<Machine, Error> {
        let Self { name, kind, ranks, memory, compute, calls, threads, host, links } = self;
        let kind = match (kind, threads, host, links) {
            (KindName::Device, None, Some(host), Some(links)) => {
                Kind::Device(Box::new(Device { host, links }))
            }
            (KindName::Host, Some(threads), None, None) => Kind::Host(threads),
            (KindName::Device, ..) => {
                return Err(kind_problem("a device has the tables host and links, and no threads"));
            }
            (KindName::Host, ..) => {
                return Err(kind_problem(
                    "a host has the table threads, and neither host nor links",
                ));
            }
        };
        Ok(Machine { name, ranks, memory, compute, calls, kind })
    }
}

fn kind_problem(problem: &str) -> Error {
    Error::MachineFile { place: "kind".into(), problem: problem.into() }
}

/// The error at `key` in a file, in one line.
fn problem(text: &str, key: String, error: &toml::de::Error) -> Error {
    let start = error.span().map(|span| span.start.min(text.len()));
    let line =
        start.map(|start| text.as_bytes()[..start].iter().filter(|it| **it == b'\n').count() + 1);
    let place = match (line, key.as_str()) {
        (Some(line), "" | ".") => format!("line {line}"),
        (Some(line), key) => format!("line {line}, {key}"),
        (None, key) => key.to_owned(),
    };
    Error::MachineFile {
        place,
        problem: error.message().split_whitespace().collect::<Vec<_>>().join(" "),
    }
}

/// `text` as a string of TOML.
fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}
