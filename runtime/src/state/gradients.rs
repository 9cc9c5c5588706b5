//! Gradients of units: as the program gives them, and as they wait unsharded for the last
//! microbatch (mode `Local`), summed in f32.

use std::sync::Arc;

use hsdp_comm::NonFiniteAt;
use hsdp_kernels::cuda::{CudaError, DeviceBuffer, DevicePart, Noted, Notes};
use hsdp_kernels::memory::Category;
use hsdp_kernels::{
    Divisor, Fold, GradientValues, Scaling, Wire, contribute, read_once, sum_contributions,
};
use hsdp_sharding::step::Refused;
use hsdp_sharding::{DType, ParamSlot, Rank, Role, Unit, UnitId, UnitLayout};

use crate::error::Error;
use crate::state::context::{Context, ErrorSite};
use crate::state::model_device::ModelDevice;
use crate::state::sighting::Sighting;
use crate::state::store::{Located, There, zeros_in};
use crate::state::sums::{NotedUnit, first_noted, sighting_in_unit};

/// The gradients of one unit in one microbatch, for [`Pass::reduce`](crate::Pass::reduce): one
/// entry for each parameter of the unit, in the order of its declaration.
///
/// An entry is the gradient of the full parameter: as many elements as its declared shape has, flat
/// and row-major. `Vec<f32>`, `Vec<f16>` and `Vec<bf16>` are gradients, and a tensor of another
/// type is one if it implements [`GradientValues`]. They are read in place, without a copy, and
/// dropped when the reduction is complete. A parameter that is frozen, or that the loss does not
/// use, has an entry without a gradient. Where a trainable parameter has none, zeros are summed.
///
/// ```
/// use hsdp::UnitGradients;
///
/// // A weight of shape [2, 3] and its bias.
/// let weight = vec![0.5_f32; 6];
/// let bias = vec![1.0_f32; 2];
/// let both = UnitGradients::of([weight.clone(), bias]);
/// let frozen_bias = UnitGradients::new().with(weight).without();
/// # drop((both, frozen_bias));
/// ```
///
/// An adapter, which has gradients of several types or shares them, collects its entries:
///
/// ```
/// use std::sync::Arc;
/// use hsdp::{GradientValues, UnitGradients};
///
/// let shared: Arc<dyn GradientValues> = Arc::new(vec![0.5_f32; 6]);
/// let gradients: UnitGradients = [Some(shared), None].into_iter().collect();
/// # drop(gradients);
/// ```
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct UnitGradients {
    pub(crate) entries: Vec<Option<Arc<dyn GradientValues>>>,
}

impl UnitGradients {
    /// Returns the gradients of a unit without parameters, to which [`with`](Self::with) and
    /// [`without`](Self::without) add entries.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the gradients of a unit that has one for each of its parameters.
    pub fn of<G: GradientValues + 'static>(gradients: impl IntoIterator<Item = G>) -> Self {
        gradients.into_iter().fold(Self::new(), Self::with)
    }

    /// Adds the gradient of the next parameter.
    pub fn with(mut self, gradient: impl GradientValues + 'static) -> Self {
        self.entries.push(Some(Arc::new(gradient)));
        self
    }

    /// Adds an entry without a gradient: the next parameter is frozen or unused.
    pub fn without(mut self) -> Self {
        self.entries.push(None);
        self
    }

    /// Checks that the model has the unit, and that these are its gradients: one entry for each
    /// parameter, each gradient of the parameter's size, and none for frozen ones.
    pub(crate) fn check(&self, context: &Context, step: u64, unit: UnitId) -> Result<(), Error> {
        let units = context.plan.spec().units().len();
        if unit.index() >= units {
            let what = Refused::NoSuchUnit { unit, units }.to_string();
            return Err(context.misuse("reduce", step, what));
        }
        let spec = &context.plan.spec()[unit];
        if self.entries.len() != spec.params.len() {
            let what = format!(
                "unit {} has {} parameters, {} gradients were given",
                spec.name,
                spec.params.len(),
                self.entries.len()
            );
            return Err(context.misuse("reduce", step, what));
        }
        let slots = context.plan.layout(unit).params();
        for ((slot, parameter), gradient) in slots.iter().zip(&spec.params).zip(&self.entries) {
            let Some(gradient) = gradient else { continue };
            if parameter.role == Role::Frozen {
                let what =
                    format!("parameter {} is frozen and was given a gradient", &parameter.name);
                return Err(context.misuse("reduce", step, what));
            }
            if gradient.len() != slot.len {
                return Err(Error::Size {
                    operation: "reduce",
                    name: parameter.name.clone(),
                    rank: context.rank(),
                    got: gradient.len(),
                    want: slot.len,
                });
            }
        }
        Ok(())
    }
}

/// Collects one entry for each parameter: a gradient that may be shared, or `None` for a parameter
/// that is frozen or unused.
impl FromIterator<Option<Arc<dyn GradientValues>>> for UnitGradients {
    fn from_iter<I: IntoIterator<Item = Option<Arc<dyn GradientValues>>>>(entries: I) -> Self {
        Self { entries: entries.into_iter().collect() }
    }
}

/// Gradients that wait unsharded, where the model lies.
#[derive(Debug)]
pub(crate) struct Unsharded {
    /// Sums by unit.
    units: Vec<UnitSum>,
    /// Notes of a device on sums that were given away.
    given: Vec<(UnitId, Noted)>,
}

/// The sum of a unit's gradients in a step: on the host one for each parameter, on a device one of
/// the unit's trainable region, from its first gradient on.
type UnitSum = Located<Vec<ParameterSum>, Option<FlatSum>>;

impl Unsharded {
    /// Makes sums that belong to no step yet.
    pub(crate) fn new(context: &Context) -> Self {
        let of_unit = |unit: &Unit| match &context.device {
            None => Located::Host(unit.params.iter().map(|_| ParameterSum::none()).collect()),
            Some(device) => Located::Device(There { value: None, device: Arc::clone(device) }),
        };
        let units = context.plan.spec().units().iter().map(of_unit).collect();
        Self { units, given: Vec::new() }
    }

    /// Begins a step. Buffers on the host that no rank reads any more are kept; those of a device
    /// are in its pool.
    pub(crate) fn begin(&mut self) {
        for unit in &mut self.units {
            match unit {
                Located::Host(sums) => sums.iter_mut().for_each(ParameterSum::reset),
                Located::Device(there) => there.value = None,
            }
        }
        self.given.clear();
    }

    /// Adds the gradients that this rank has of one unit in a microbatch. Returns the first sum
    /// that is not finite, if there is one: after the reduction its microbatch is no longer known.
    /// A device notes it itself, and the step reads it at its end.
    ///
    /// # Errors
    /// If there is no memory for a sum; those of a device.
    pub(crate) fn add(
        &mut self,
        site: ErrorSite<'_>,
        unit: UnitId,
        microbatch: usize,
        gradients: &UnitGradients,
    ) -> Result<Option<NonFiniteAt>, Error> {
        match &mut self.units[unit.index()] {
            Located::Host(sums) => add_here(sums, site.context.rank(), gradients)
                .map_err(|error| site.memory(unit, error)),
            Located::Device(There { value, device }) => {
                let layout = site.context.plan.layout(unit);
                let added = add_there(value, device, layout, microbatch, gradients);
                added.map(|()| None).map_err(|error| site.device(error))
            }
        }
    }

    /// Gives the sums of one unit away; parameters that never had a gradient have none.
    pub(crate) fn take(&mut self, layout: &UnitLayout, unit: UnitId) -> UnitGradients {
        let there = match &mut self.units[unit.index()] {
            Located::Host(sums) => return sums.iter_mut().map(ParameterSum::give).collect(),
            Located::Device(there) => there.value.take(),
        };
        let Some(FlatSum { flat, has, noted }) = there else {
            return layout.params().iter().map(|_| None).collect();
        };
        self.given.push((unit, noted));
        let flat = Arc::new(flat);
        let part = |(slot, has): (&ParamSlot, bool)| {
            let part = || DevicePart::new(Arc::clone(&flat), slot.range());
            has.then(|| Arc::new(part()) as Arc<dyn GradientValues>)
        };
        layout.params().iter().zip(has).map(part).collect()
    }

    /// Returns the first sighting that a device has noted in sums that were given away. Waits for
    /// all work that is under way there.
    pub(crate) fn sighting(&self, site: ErrorSite<'_>) -> Result<Option<Sighting>, Error> {
        let given = self.given.iter().map(|(unit, noted)| NotedUnit { unit: *unit, noted });
        first_noted(site, &given.collect::<Vec<_>>(), sighting_in_unit)
    }
}

/// The sum of a parameter's gradients in a step, on the host.
#[derive(Debug)]
struct ParameterSum {
    /// Other ranks read it once it is given away. Before the first gradient it may be the buffer of
    /// the step before.
    buffer: Arc<Vec<f32>>,
    state: SumState,
}

/// The state of a sum in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SumState {
    /// No gradient has come.
    Nothing,
    /// It is the sum of the gradients so far.
    Some,
    /// It was given away. Another gradient begins a new sum.
    Given,
}

/// Adds gradients of a unit on the host.
fn add_here(
    sums: &mut [ParameterSum],
    rank: Rank,
    gradients: &UnitGradients,
) -> Result<Option<NonFiniteAt>, hsdp_kernels::Error> {
    let mut found = None;
    for (param, (sum, gradient)) in sums.iter_mut().zip(&gradients.entries).enumerate() {
        let Some(gradient) = gradient.as_deref() else { continue };
        let non_finite = sum.add(param, gradient)?;
        if let (None, Some(at)) = (found, non_finite) {
            let from = (!is_finite(gradient, param, at)).then_some(rank);
            found = Some(NonFiniteAt { param, from });
        }
    }
    Ok(found)
}

impl ParameterSum {
    /// Returns a sum without memory.
    fn none() -> Self {
        Self { buffer: Arc::default(), state: SumState::Nothing }
    }

    /// Begins a step. A buffer that no rank reads any more is kept.
    fn reset(&mut self) {
        self.state = SumState::Nothing;
        if Arc::get_mut(&mut self.buffer).is_none() {
            self.buffer = Arc::default();
        }
    }

    /// Adds the gradient of parameter `param`. Returns the first element of the sum that is not
    /// finite.
    fn add(
        &mut self,
        param: usize,
        gradient: &dyn GradientValues,
    ) -> Result<Option<usize>, hsdp_kernels::Error> {
        let fold = if self.state == SumState::Some { Fold::Add } else { Fold::Replace };
        let sum = self.exclusive(gradient.len())?;
        let mut non_finite = None;
        read_once(gradient, param, 0..gradient.len(), &mut |values| {
            non_finite = sum_contributions(sum, &[values], Scaling::on(Wire::F32), fold);
        });
        self.state = SumState::Some;
        Ok(non_finite)
    }

    /// Returns the buffer, for this rank alone; a new one where another rank reads the old one, or
    /// it has another length.
    fn exclusive(&mut self, len: usize) -> Result<&mut Vec<f32>, hsdp_kernels::Error> {
        if Arc::get_mut(&mut self.buffer).is_none_or(|buffer| buffer.len() != len) {
            self.buffer = Arc::new(zeros_in(Category::GradFull, len)?);
        }
        Ok(Arc::get_mut(&mut self.buffer).expect("there is no other handle"))
    }

    /// Gives the sum away, if there is one.
    fn give(&mut self) -> Option<Arc<dyn GradientValues>> {
        if self.state != SumState::Some {
            return None;
        }
        self.state = SumState::Given;
        Some(Arc::clone(&self.buffer) as Arc<dyn GradientValues>)
    }
}

/// The sum of a unit's gradients in a step, on a device.
#[derive(Debug)]
struct FlatSum {
    flat: DeviceBuffer,
    /// By parameter: whether it has got a gradient.
    has: Vec<bool>,
    noted: Noted,
}

/// Adds gradients of a unit on a device: one launch to cast and lay them out, and one to add.
fn add_there(
    sum: &mut Option<FlatSum>,
    device: &ModelDevice,
    layout: &UnitLayout,
    round: usize,
    gradients: &UnitGradients,
) -> Result<(), CudaError> {
    let stream = &*device.stream;
    let mut flat = device.buffer(Category::GradFull, DType::F32, layout.trainable().len)?;
    let entries = layout.params().iter().zip(&gradients.entries);
    let entries: Vec<(usize, Option<&dyn GradientValues>)> =
        entries.map(|(slot, gradient)| (slot.start, gradient.as_deref())).collect();
    let (former, mut has, mut noted) = match sum.take() {
        Some(FlatSum { flat, has, noted }) => (Some(flat), has, noted),
        None => (None, vec![false; entries.len()], Noted::new(stream)?),
    };
    let notes = Some(Notes { noted: &mut noted, round });
    stream.pack_gradients(&mut flat, &entries, Divisor::ONE, notes)?;
    if let Some(mut total) = former {
        let notes = Some(Notes { noted: &mut noted, round });
        stream.sum(&mut total, &[&flat], 0..flat.len(), Divisor::ONE, Fold::Add, notes)?;
        flat = total;
    }
    for (has, gradient) in has.iter_mut().zip(&gradients.entries) {
        *has |= gradient.is_some();
    }
    *sum = Some(FlatSum { flat, has, noted });
    Ok(())
}

/// Returns whether one element of the gradient of parameter `param` is finite.
fn is_finite(gradient: &dyn GradientValues, param: usize, at: usize) -> bool {
    let mut element = [0.0];
    read_once(gradient, param, at..at + 1, &mut |values| {
        contribute(&mut element, values, Divisor::ONE, Wire::F32, Fold::Replace);
    });
    element[0].is_finite()
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use hsdp_kernels::Values;

    use super::*;

    /// A gradient that lends single elements not at all, and more of them in halves, against the
    /// contract.
    #[derive(Debug)]
    struct Halves(Vec<f32>);

    impl GradientValues for Halves {
        fn len(&self) -> usize {
            self.0.len()
        }

        fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
            let half = range.len() / 2;
            let halves = [range.start..range.start + half, range.start + half..range.end];
            halves
                .into_iter()
                .filter(|_| half > 0)
                .for_each(|part| visit(Values::F32(&self.0[part])));
        }
    }

    #[test]
    fn a_gradient_that_is_not_lent_once_and_whole_is_refused() {
        let gradient = Halves(vec![1.0; 8]);
        let added = catch_unwind(AssertUnwindSafe(|| ParameterSum::none().add(2, &gradient)));
        assert!(added.is_err(), "{added:?}");
        let looked = catch_unwind(AssertUnwindSafe(|| is_finite(&gradient, 2, 0)));
        assert!(looked.is_err(), "{looked:?}");
    }
}
