//! The kernels' source, which is compiled as one.

/// All files of `kernels/cuda` that a device runs, in order: the first is what the others use.
pub(super) const SOURCE: &str = concat!(
    include_str!("../../cuda/number.cuh"),
    include_str!("../../cuda/pack.cu"),
    include_str!("../../cuda/sum.cu"),
    include_str!("../../cuda/inspect.cu"),
    include_str!("../../cuda/update.cu"),
);

/// The names of the kernels, without what is appended for a dtype, and what may be.
const WIRES: [&str; 3] = ["f32", "f16", "bf16"];
const OF_A_WIRE: [&str; 4] = ["pack", "unpack", "sum", "narrow"];
const CASTS: [&str; 3] = ["alone", "f16", "bf16"];
const OF_A_CAST: [&str; 2] = ["adamw", "sgd"];
const OF_ONE_KIND: [&str; 2] = ["inspect", "inspect_blocks"];

/// The name of each kernel.
pub(super) fn kernels() -> impl Iterator<Item = String> {
    let each = |kernels: &'static [&str], kinds: &'static [&str]| {
        let of_one = move |kernel| kinds.iter().map(move |kind| format!("{kernel}_{kind}"));
        kernels.iter().flat_map(of_one)
    };
    let of_one_kind = OF_ONE_KIND.iter().map(|kernel| (*kernel).to_owned());
    each(&OF_A_WIRE, &WIRES).chain(each(&OF_A_CAST, &CASTS)).chain(of_one_kind)
}
