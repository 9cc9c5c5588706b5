//! Machines as data: what a prediction needs to know of them, with the source of every number.

mod file;
mod quantity;
mod sections;
mod unit;

#[cfg(test)]
mod tests;

use std::fmt;

use hsdp_sharding::{ByteCount, DType};

pub use self::quantity::Quantity;
pub use self::sections::{Calls, Compute, DeviceHost, Link, Links, Memory, NetworkLink, Threads};
pub use self::unit::{
    Bytes, BytesPerSecond, Count, Flop, FlopPerSecond, Measure, Ratio, Seconds, Unit,
};

use self::quantity::{NumberMut, check, text};
use crate::Error;

/// A machine, or a cluster of equal ones, on which ranks train.
///
/// [`from_toml`](Self::from_toml) reads it; MACHINES.md beside the sources describes the file.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// Its name.
    pub name: String,
    /// The ranks of one machine, which are its cards; of a host its cores, which any number of ranks share.
    pub ranks: Quantity<Count>,
    /// The memory of a card, or of the host.
    pub memory: Memory,
    /// The computation of a rank on a card, or of a core of the host.
    pub compute: Compute,
    /// The costs of a call of a collective.
    pub calls: Calls,
    /// The numbers that only cards have, or only hosts.
    pub kind: Kind,
}

/// Where ranks compute.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// On cards, a rank each, with streams of their own.
    Device(Box<Device>),
    /// On the cores of one host: the ranks' threads compute, and share its memory.
    Host(Threads),
}

/// The parts of a machine with cards beside them.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// The host's memory, and each card's link to it.
    pub host: DeviceHost,
    /// The links between cards.
    pub links: Links,
}

/// A number of a machine, for people and for fits.
#[derive(Clone, Debug)]
pub struct Number {
    /// Its key in the file: `links.machine.latency`.
    pub name: String,
    /// Its value in the unit.
    pub value: f64,
    /// The unit, with the range of possible values.
    pub unit: Unit,
    /// The source of the value.
    pub source: String,
}

/// Its value with the unit, as a machine file has it.
impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&text(self.value, &self.unit))
    }
}

impl Machine {
    /// Its device; none for a host.
    #[must_use]
    pub const fn device(&self) -> Option<&Device> {
        match &self.kind {
            Kind::Device(device) => Some(device),
            Kind::Host(_) => None,
        }
    }

    /// Whether the host of a machine with cards holds so many bytes for each rank on it, of `ranks` in all. A machine that is a host holds nothing
    /// beside the memory of its ranks.
    #[must_use]
    pub fn host_holds(&self, each: ByteCount, ranks: usize) -> bool {
        let sharing = self.cards().min(ranks) as f64;
        let capacity = self.device().map_or(0.0, |device| device.host.capacity.value());
        each.get() as f64 * sharing <= capacity
    }

    /// The cards of a machine, or the cores of a host.
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

    /// All numbers, in the order of the file.
    #[must_use]
    pub fn numbers(&self) -> Vec<Number> {
        let mut numbers = Vec::new();
        self.clone().visit(&mut |NumberMut { name, value, source, unit }| {
            numbers.push(Number { name, value: *value, unit, source: source.clone() });
        });
        numbers
    }

    /// Replaces the number called `name`, as a fit does, by `value` (in its unit) from `source`.
    ///
    /// # Errors
    /// [`Error::MachineNumber`] if the machine has no such number, if the value is physically impossible, or if the source is empty.
    /// The machine is as before then.
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
            Kind::Host(threads) => threads.visit("threads", visit),
            Kind::Device(device) => {
                device.host.visit("host", visit);
                device.links.machine.visit("links.machine", visit);
                if let Some(network) = &mut device.links.network {
                    network.visit("links.network", visit);
                }
            }
        }
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
    /// The peak of products of matrices of `dtype`, with accumulation in f32; none for dtypes that no training computes in.
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
