//! Machines as data: what a prediction needs to know of them, with the source of every number.

mod quantity;

#[cfg(test)]
mod tests;

use std::fmt::{self, Write as _};

use hsdp_sharding::{ByteCount, DType};
use serde::Deserialize;

pub use self::quantity::{
    Bytes, BytesPerSecond, Count, Flop, FlopPerSecond, Measure, MeasureUnit, Quantity, Ratio,
    Seconds,
};

use self::quantity::{NumberMut, check, text};
use crate::{Error, bundled};

/// A machine, or a cluster of equal ones, on which ranks train.
///
/// [`from_toml`](Self::from_toml) reads it; MACHINES.md beside the sources describes the file.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// Its name.
    pub name: String,
    /// The ranks of one machine, which are its cards; of a host its cores, which any number of
    /// ranks share.
    pub ranks: Quantity<Count>,
    /// The memory of a card, or of the host.
    pub memory: Memory,
    /// The computation of a rank on a card, or of a core of the host.
    pub compute: Compute,
    /// The costs of a call of a collective.
    pub calls: Calls,
    /// The numbers that only cards have, or only hosts.
    pub kind: MachineKind,
}

/// Where ranks compute.
#[derive(Clone, Debug, PartialEq)]
pub enum MachineKind {
    /// On cards, a rank each, with streams of their own.
    Device(Box<DeviceMachine>),
    /// On the cores of one host: the ranks' threads compute, and share its memory.
    Host(Threads),
}

/// The parts of a machine with cards beside them.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceMachine {
    /// The host's memory, and each card's link to it.
    pub host: DeviceHost,
    /// The links between cards.
    pub links: Links,
}

/// A number of a machine, for people and for fits.
#[derive(Clone, Debug)]
pub struct NamedNumber {
    /// Its key in the file: `links.machine.latency`.
    pub name: String,
    /// Its value in the unit.
    pub value: f64,
    /// The unit, with the range of possible values.
    pub unit: MeasureUnit,
    /// The source of the value.
    pub source: String,
}

/// Its value with the unit, as a machine file has it.
impl fmt::Display for NamedNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&text(self.value, &self.unit))
    }
}

impl Machine {
    /// The names of the bundled machines.
    pub const BUNDLED: [&str; bundled::NAMES.len()] = bundled::NAMES;

    /// Returns its device; none for a host.
    #[must_use]
    pub const fn device(&self) -> Option<&DeviceMachine> {
        match &self.kind {
            MachineKind::Device(device) => Some(device),
            MachineKind::Host(_) => None,
        }
    }

    /// Returns whether the host of a machine with cards holds so many bytes for each rank on it, of
    /// `ranks` in all. A machine that is a host holds nothing beside the memory of its ranks.
    #[must_use]
    pub fn host_holds(&self, each: ByteCount, ranks: usize) -> bool {
        let sharing = self.cards().min(ranks) as f64;
        let capacity = self.device().map_or(0.0, |device| device.host.capacity.value());
        each.get() as f64 * sharing <= capacity
    }

    /// Returns the cards of a machine, or the cores of a host.
    #[must_use]
    pub fn cards(&self) -> usize {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a whole number in 1..=1e6"
        )]
        let cards = self.ranks.value() as usize;
        cards
    }

    /// Returns all numbers, in the order of the file.
    #[must_use]
    pub fn numbers(&self) -> Vec<NamedNumber> {
        let mut numbers = Vec::new();
        self.clone().visit(&mut |NumberMut { name, value, source, unit }| {
            numbers.push(NamedNumber { name, value: *value, unit, source: source.clone() });
        });
        numbers
    }

    /// Replaces the number called `name`, as a fit does, by `value` (in its unit) from `source`.
    ///
    /// # Errors
    /// [`Error::MachineNumber`] if the machine has no such number, if the value is physically
    /// impossible, or if the source is empty. The machine is as before then.
    pub fn set(&mut self, name: &str, value: f64, source: &str) -> Result<(), Error> {
        let mut outcome = Err("is no number of this machine".to_owned());
        self.visit(&mut |number| {
            if number.name == name {
                outcome = number.replace(value, source);
            }
        });
        outcome.map_err(|problem| Error::MachineNumber { name: name.to_owned(), problem })
    }

    /// Calls `visit` for each number, in the order of the file.
    fn visit(&mut self, visit: &mut dyn FnMut(NumberMut<'_>)) {
        visit(self.ranks.number_mut("ranks".into()));
        self.memory.visit("memory", visit);
        self.compute.visit("compute", visit);
        self.calls.visit("calls", visit);
        match &mut self.kind {
            MachineKind::Host(threads) => threads.visit("threads", visit),
            MachineKind::Device(device) => {
                device.host.visit("host", visit);
                device.links.machine.visit("links.machine", visit);
                if let Some(network) = &mut device.links.network {
                    network.visit("links.network", visit);
                }
            }
        }
    }

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
    /// [`Error::MachineFile`], with the line and the key, if the text is no TOML, if a number is
    /// missing, unknown, without a unit or a source, or physically impossible, or if a table does
    /// not belong to the machine's kind.
    pub fn from_toml(text: &str) -> Result<Self, Error> {
        let syntax = |error: toml::de::Error| problem(text, String::new(), &error);
        let deserializer = toml::Deserializer::parse(text).map_err(syntax)?;
        let file: Result<MachineFile, _> = serde_path_to_error::deserialize(deserializer);
        file.map_err(|error| problem(text, error.path().to_string(), error.inner()))?.machine()
    }

    /// Returns the machine as a file: [`from_toml`](Self::from_toml) reads it as the same machine.
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
            let value = quoted(&text(*value, &unit));
            let source = quoted(source);
            let _ = writeln!(lines, "{key} = {{ value = {value}, source = {source} }}");
        });
        lines
    }
}

impl NumberMut<'_> {
    fn replace(self, value: f64, source: &str) -> Result<(), String> {
        check(value, &self.unit).map_err(|problem| format!("{value} {problem}"))?;
        if source.trim().is_empty() {
            return Err("needs a source".into());
        }
        *self.value = value;
        *self.source = source.to_owned();
        Ok(())
    }
}

impl Compute {
    /// Returns the peak of products of matrices of `dtype`, with accumulation in f32; none for
    /// dtypes that no training computes in.
    #[must_use]
    pub const fn peak(&self, dtype: DType) -> Option<&Quantity<FlopPerSecond>> {
        match dtype {
            DType::F32 => Some(&self.f32),
            DType::BF16 => Some(&self.bf16),
            DType::F16 => Some(&self.f16),
            _ => None,
        }
    }
}

/// Tables of numbers. A number is one line here: the file, [`numbers`](super::Machine::numbers) and
/// [`set`](super::Machine::set) follow from it.
macro_rules! sections {
    ($(
        $(#[$doc:meta])*
        $name:ident { $($(#[$number_doc:meta])* $number:ident: $measure:ident,)* }
    )*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Debug, PartialEq, Deserialize)]
            #[serde(deny_unknown_fields)]
            pub struct $name {
                $($(#[$number_doc])* pub $number: Quantity<$measure>,)*
            }

            impl $name {
                /// Calls `visit` for each number; `table` is the name of this table.
                fn visit(&mut self, table: &str, visit: &mut dyn FnMut(NumberMut<'_>)) {
                    $(visit(self.$number.number_mut(format!("{table}.{}", stringify!($number))));)*
                }
            }
        )*
    };
}

sections! {
    /// The memory in which ranks compute.
    Memory {
        /// Bytes of a card, or of the host.
        capacity: Bytes,
        /// Bytes read and written a second, of a card, or of the host with all its cores.
        bandwidth: BytesPerSecond,
        /// The part of the bandwidth that a pass over large buffers gets.
        efficiency: Ratio,
    }

    /// The computation of a rank on a card, or of a core of a host.
    Compute {
        /// Peak of products of matrices in f32.
        f32: FlopPerSecond,
        /// Peak of products of matrices in bf16.
        bf16: FlopPerSecond,
        /// Peak of products of matrices in f16.
        f16: FlopPerSecond,
        /// The part of the peak that large products get.
        efficiency: Ratio,
        /// Part of the peak that products get if the bytes of a stride are no multiple of 16; above
        /// `efficiency` it counts as that.
        unaligned: Ratio,
        /// The operations of a product that gets half of that part.
        half: Flop,
        /// Time of the host's thread for the launch of a kernel; of a host, for a call of one.
        launch: Seconds,
        /// Time of a kernel on the card beyond that of its operations or bytes.
        kernel: Seconds,
    }

    /// The costs of a call of a collective, whatever its bytes.
    Calls {
        /// Time of the rank's thread to issue one.
        issue: Seconds,
        /// Time from the moment at which the last member is ready to the first byte that moves,
        /// beyond NCCL's own constants; of a host, the time of a meeting of ranks that have a core
        /// each.
        start: Seconds,
    }

    /// Threads that share the cores of a host.
    Threads {
        /// Time until a thread that slept runs on a core that another had.
        switch: Seconds,
    }

    /// The host of a machine with cards: its memory, for what cards offload, and its messages.
    DeviceHost {
        /// Bytes of memory of a machine, for all its cards together.
        capacity: Bytes,
        /// Bytes of that memory read and written a second, by all its cores.
        memory: BytesPerSecond,
        /// Bytes a second between a card and its host, in one direction.
        bandwidth: BytesPerSecond,
        /// The part of the bandwidth that large copies get.
        efficiency: Ratio,
        /// Time of a message from a rank's process to another's, as an exchange on the control
        /// channel sends it.
        message: Seconds,
    }

    /// The links between the cards of a machine.
    Link {
        /// Time of a step of a ring with NCCL's protocol Simple.
        latency: Seconds,
        /// Bytes a second that a card sends while it receives as many.
        bandwidth: BytesPerSecond,
        /// The part of the bandwidth that large collectives get.
        efficiency: Ratio,
    }

    /// The network between machines.
    NetworkLink {
        /// Time of a step of a ring with NCCL's protocol Simple.
        latency: Seconds,
        /// Bytes a second that a machine sends while it receives as many, by all its adapters.
        bandwidth: BytesPerSecond,
        /// The number of its adapters: a card uses one at a time.
        adapters: Count,
        /// The part of the bandwidth that large collectives get.
        efficiency: Ratio,
    }
}

/// The links between cards, by level.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Links {
    /// Between the cards of a machine.
    pub machine: Link,
    /// Between machines; none if there is only one.
    pub network: Option<NetworkLink>,
}

/// A machine file, as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MachineFile {
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

impl MachineFile {
    fn machine(self) -> Result<Machine, Error> {
        let Self { name, kind, ranks, memory, compute, calls, threads, host, links } = self;
        let kind = match (kind, threads, host, links) {
            (KindName::Device, None, Some(host), Some(links)) => {
                MachineKind::Device(Box::new(DeviceMachine { host, links }))
            }
            (KindName::Host, Some(threads), None, None) => MachineKind::Host(threads),
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

/// Returns the error at `key` in a file, in one line.
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
