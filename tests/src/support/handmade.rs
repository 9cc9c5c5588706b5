//! Plays the autograd for models whose forward and backward are written by hand.

use hsdp::{Error, Full, LossSum, Param, Pass, Seed, Step, Unit, UnitGradients, UnitId, Values};
use hsdp_sharding::{AfterForward, ModelSpec, Role};

/// A model whose forward and backward are written by hand, one parameter at a time.
pub trait Handmade {
    /// Sees a parameter in the forward.
    fn forward(&mut self, param: &Param, values: Values<'_>);

    /// The loss of this microbatch, once the forward has seen every parameter.
    fn loss(&self) -> LossSum;

    /// The derivative of the loss by each element of a parameter; `None` where it is not used.
    fn derivative(&self, param: &Param, values: Values<'_>) -> Option<Vec<f32>>;
}

/// How far a rank gets with a microbatch before it walks away from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// One unit has been through the forward.
    FirstForward,
    /// The forward is done, and the loss is not given yet.
    Forward,
    /// One unit has been through the backward.
    FirstBackward,
    /// All units have been through the backward; the microbatch is not finished.
    Backward,
    /// The microbatch is finished.
    End,
}

/// Runs one microbatch of `model`, as an autograd would: units forward, the loss, units backward.
///
/// # Errors
/// The error of the runtime.
pub fn microbatch(step: &mut Step<'_>, model: &mut dyn Handmade) -> Result<(), Error> {
    microbatch_until(step, model, Until::End)
}

/// Runs one microbatch of `model` as far as `until`.
///
/// # Errors
/// The error of the runtime.
pub fn microbatch_until(
    step: &mut Step<'_>,
    model: &mut dyn Handmade,
    until: Until,
) -> Result<(), Error> {
    run(step.microbatch()?, model, until)
}

/// Runs a microbatch of `model` that has begun as far as `until`.
///
/// # Errors
/// The error of the runtime.
pub fn run(mut pass: Pass<'_>, model: &mut dyn Handmade, until: Until) -> Result<(), Error> {
    let handle = pass.handle();
    let spec = handle.plan().spec();

    let mut kept: Vec<Option<Full>> = Vec::new();
    for id in spec.unit_ids() {
        let full = pass.unshard(id)?;
        for (index, param) in spec[id].params.iter().enumerate() {
            model.forward(param, full.values(index));
        }
        kept.push(is_kept(&spec[id]).then_some(full));
        if until == Until::FirstForward {
            return Ok(());
        }
    }
    if until == Until::Forward {
        return Ok(());
    }
    let seed = pass.loss(model.loss())?;
    let has_backward = |id: &UnitId| spec[*id].after_forward != AfterForward::Discard;
    for id in spec.unit_ids().rev().filter(has_backward) {
        let held = kept[id.index()].take();
        backward(&mut pass, spec, id, held, &|param, values| seeded(model, seed, param, values))?;
        if until == Until::FirstBackward {
            return Ok(());
        }
    }
    if until == Until::Backward { Ok(()) } else { pass.finish() }
}

type Derivative<'a> = &'a dyn Fn(&Param, Values<'_>) -> Option<Vec<f32>>;

fn backward(
    pass: &mut Pass<'_>,
    spec: &ModelSpec,
    id: UnitId,
    held: Option<Full>,
    derivative: Derivative<'_>,
) -> Result<(), Error> {
    let full = match held {
        Some(full) => full,
        None => pass.unshard(id)?,
    };
    let params = spec[id].params.iter().enumerate();
    let gradients =
        params.fold(UnitGradients::new(), |gradients, (index, param)| {
            match derivative(param, full.values(index)) {
                Some(gradient) => gradients.with(gradient),
                None => gradients.without(),
            }
        });
    drop(full);
    if spec[id].is_trainable() { pass.reduce(id, gradients) } else { Ok(()) }
}

fn seeded(model: &dyn Handmade, seed: Seed, param: &Param, values: Values<'_>) -> Option<Vec<f32>> {
    if param.role == Role::Frozen {
        return None;
    }
    let mut gradient = model.derivative(param, values)?;
    for element in &mut gradient {
        *element *= in_f32(seed.value());
    }
    Some(gradient)
}

/// The nearest f32, as an autograd in f32 would see it.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "rounding is what is asked for")]
pub fn in_f32(value: f64) -> f32 {
    value as f32
}

fn is_kept(unit: &Unit) -> bool {
    unit.after_forward == AfterForward::Keep
}
