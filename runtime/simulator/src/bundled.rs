//! The machines that the crate brings along.

use super::Machine;
use crate::Error;

const FILES: [(&str, &str); 4] = [
    ("a100-node", include_str!("../../machines/a100-node.toml")),
    ("a100-cluster", include_str!("../../machines/a100-cluster.toml")),
    ("h100-cluster", include_str!("../../machines/h100-cluster.toml")),
    ("two-core-cpu", include_str!("../../machines/two-core-cpu.toml")),
];

impl Machine {
    /// The names of the bundled machines.
    pub const BUNDLED: [&str; FILES.len()] = {
        let mut names = [""; FILES.len()];
        let mut index = 0;
        while index < names.len() {
            names[index] = FILES[index].0;
            index += 1;
        }
        names
    };

    /// The bundled machine of that name.
    ///
    /// # Errors
    /// [`Error::UnknownMachine`]
    pub fn bundled(name: &str) -> Result<Self, Error> {
        let file = FILES.into_iter().find(|(it, _)| *it == name);
        let unknown = || Error::UnknownMachine { name: name.to_owned() };
        Self::from_toml(file.ok_or_else(unknown)?.1)
    }
}
