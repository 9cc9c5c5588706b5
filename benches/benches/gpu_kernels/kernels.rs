//! All that is measured, by name.

use hsdp_kernels::Fold;
use hsdp_kernels::cuda::CudaError;
use hsdp_sharding::DType;

use crate::case::Case;
use crate::inspect::Inspect;
use crate::pack::{Pack, Shape};
use crate::source::Source;
use crate::sum::{Members, Narrow, Sum};
use crate::update::{Rule, Update};

/// Makes a case of so many elements.
pub(crate) type Make = Box<dyn Fn(&Source<'_>, usize) -> Result<Box<dyn Case>, CudaError>>;

/// What makes a case, and its name.
pub(crate) struct Named {
    pub(crate) name: String,
    pub(crate) make: Make,
}

const F32: &[DType] = &[DType::F32];
const BF16: &[DType] = &[DType::BF16];
const MIXED: &[DType] = &[DType::F32, DType::BF16];

/// Many parameters are as many.
const MANY: usize = 100;

pub(crate) fn all() -> Vec<Named> {
    packs().chain(sums()).chain(others()).chain(updates()).collect()
}

fn packs() -> impl Iterator<Item = Named> {
    let dtypes = [(1, F32), (1, BF16), (MANY, F32), (MANY, BF16), (MANY, MIXED)];
    let shapes = dtypes.into_iter().flat_map(|(count, dtypes)| {
        [DType::BF16, DType::F32].map(|flat| Shape { count, dtypes, flat })
    });
    shapes.map(|shape| {
        let Shape { count, flat, .. } = shape;
        let name = format!("pack {count} x {} to {flat}", of(shape));
        named(name, move |source, len| Pack::new(source, shape, len))
    })
}

fn sums() -> impl Iterator<Item = Named> {
    let wires = [DType::BF16, DType::F32].into_iter();
    let counted = wires.flat_map(|wire| [1, 2, 4].map(|count| (wire, count)));
    let folds = [(Fold::Replace, "replace"), (Fold::Add, "add")];
    let all = counted.flat_map(move |(wire, count)| folds.map(|fold| (wire, count, fold)));
    all.map(|(wire, count, (fold, said))| {
        let members = Members { count, wire, fold };
        let name = format!("sum {count} x {wire}, {said}");
        named(name, move |source, len| Sum::new(source, members, len))
    })
}

fn others() -> impl Iterator<Item = Named> {
    let narrow = |dtype: DType| {
        named(format!("narrow to {dtype}"), move |source, len| Narrow::new(source, dtype, len))
    };
    [narrow(DType::BF16), narrow(DType::F16), named("inspect".to_owned(), Inspect::new)].into_iter()
}

fn updates() -> impl Iterator<Item = Named> {
    let rules = [(Rule::AdamW, "adamw"), (Rule::Sgd, "sgd")];
    let kinds = [(1, None), (1, Some(DType::BF16)), (MANY, Some(DType::BF16))];
    let all = rules.into_iter().flat_map(move |rule| kinds.map(|kind| (rule, kind)));
    all.map(|((rule, said), (count, cast))| {
        let to = cast.map_or(String::new(), |dtype| format!(", to {dtype}"));
        let name = format!("{said}, {count} x{to}");
        named(name, move |source, len| Update::new(source, rule, len, count, cast))
    })
}

fn named<C: Case + 'static>(
    name: String,
    make: impl Fn(&Source<'_>, usize) -> Result<C, CudaError> + 'static,
) -> Named {
    let make: Make =
        Box::new(move |source, len| make(source, len).map(|case| Box::new(case) as Box<dyn Case>));
    Named { name, make }
}

/// The dtypes of a shape's parameters, in a word.
fn of(shape: Shape) -> String {
    match shape.dtypes {
        [one] => one.to_string(),
        _ => "mixed".to_owned(),
    }
}
