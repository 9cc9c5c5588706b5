//! The files of the machines that the crate brings along, by name.

const FILES: [(&str, &str); 4] = [
    ("a100-node", include_str!("../machines/a100-node.toml")),
    ("a100-cluster", include_str!("../machines/a100-cluster.toml")),
    ("h100-cluster", include_str!("../machines/h100-cluster.toml")),
    ("two-core-cpu", include_str!("../machines/two-core-cpu.toml")),
];

/// The names of the machines.
pub(crate) const NAMES: [&str; FILES.len()] = [FILES[0].0, FILES[1].0, FILES[2].0, FILES[3].0];

/// Returns the file of the machine of that name.
pub(crate) fn file(name: &str) -> Option<&'static str> {
    FILES.into_iter().find(|(it, _)| *it == name).map(|(_, file)| file)
}
