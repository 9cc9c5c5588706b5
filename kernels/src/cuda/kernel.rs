//! The list of kernels.

use crate::{MatrixDType, Wire};

/// A kernel, with the dtype of its wire, the dtype to which it casts parameters, or the dtype to which it rounds what it reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    Pack(Wire),
    Unpack(Wire),
    Sum(Wire),
    Narrow(Wire),
    AdamW(Cast),
    Sgd(Cast),
    Lion(Cast),
    Muon(Cast),
    Inspect(MatrixDType),
    InspectBlocks,
    Normalize(MatrixDType),
    MuonDirection,
}

/// The dtype to which updated parameters are cast; `Alone` without a cast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cast {
    Alone,
    F16,
    BF16,
}

/// The name of each kernel, at its index.
#[rustfmt::skip]
pub(super) const NAMES: [&str; 30] = [
    "pack_f32", "pack_f16", "pack_bf16",
    "unpack_f32", "unpack_f16", "unpack_bf16",
    "sum_f32", "sum_f16", "sum_bf16",
    "narrow_f32", "narrow_f16", "narrow_bf16",
    "adamw_alone", "adamw_f16", "adamw_bf16",
    "sgd_alone", "sgd_f16", "sgd_bf16",
    "lion_alone", "lion_f16", "lion_bf16",
    "muon_alone", "muon_f16", "muon_bf16",
    "inspect_f32", "inspect_bf16", "inspect_blocks",
    "normalize_f32", "normalize_bf16", "muon_direction",
];

impl Kernel {
    /// Its index in [`NAMES`], so that a launch needs no lookup by name.
    pub(super) fn index(self) -> usize {
        let (row, column) = match self {
            Self::Pack(wire) => (0, wire as usize),
            Self::Unpack(wire) => (1, wire as usize),
            Self::Sum(wire) => (2, wire as usize),
            Self::Narrow(wire) => (3, wire as usize),
            Self::AdamW(cast) => (4, cast as usize),
            Self::Sgd(cast) => (5, cast as usize),
            Self::Lion(cast) => (6, cast as usize),
            Self::Muon(cast) => (7, cast as usize),
            Self::Inspect(dtype) => (8, dtype as usize),
            Self::InspectBlocks => (8, 2),
            Self::Normalize(dtype) => (9, dtype as usize),
            Self::MuonDirection => (9, 2),
        };
        3 * row + column
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIRES: [(Wire, &str); 3] = [(Wire::F32, "f32"), (Wire::F16, "f16"), (Wire::BF16, "bf16")];
    const CASTS: [(Cast, &str); 3] =
        [(Cast::Alone, "alone"), (Cast::F16, "f16"), (Cast::BF16, "bf16")];

    /// Each kernel, and the name that follows from its parts.
    fn all() -> Vec<(Kernel, String)> {
        let mut all = Vec::new();
        for (wire, end) in WIRES {
            let kernels = [
                (Kernel::Pack(wire), "pack"),
                (Kernel::Unpack(wire), "unpack"),
                (Kernel::Sum(wire), "sum"),
                (Kernel::Narrow(wire), "narrow"),
            ];
            all.extend(kernels.map(|(kernel, name)| (kernel, format!("{name}_{end}"))));
        }
        for (cast, end) in CASTS {
            let kernels = [
                (Kernel::AdamW(cast), "adamw"),
                (Kernel::Sgd(cast), "sgd"),
                (Kernel::Lion(cast), "lion"),
                (Kernel::Muon(cast), "muon"),
            ];
            all.extend(kernels.map(|(kernel, name)| (kernel, format!("{name}_{end}"))));
        }
        for dtype in [MatrixDType::F32, MatrixDType::BF16] {
            let kernels =
                [(Kernel::Inspect(dtype), "inspect"), (Kernel::Normalize(dtype), "normalize")];
            all.extend(kernels.map(|(kernel, name)| (kernel, format!("{name}_{dtype}"))));
        }
        all.push((Kernel::InspectBlocks, "inspect_blocks".to_owned()));
        all.push((Kernel::MuonDirection, "muon_direction".to_owned()));
        all
    }

    #[test]
    fn every_kernel_has_an_index_and_a_name_of_its_own() {
        let mut indices: Vec<usize> = all().iter().map(|(kernel, _)| kernel.index()).collect();
        indices.sort_unstable();
        assert_eq!(indices, (0..NAMES.len()).collect::<Vec<_>>());
        for (kernel, name) in all() {
            assert_eq!(NAMES[kernel.index()], name, "{kernel:?}");
        }
    }
}
