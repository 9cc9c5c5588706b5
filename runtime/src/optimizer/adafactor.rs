//! Adafactor: a second moment that is factored along the rows and the columns of a matrix.

use std::collections::BTreeMap;
use std::ops::Range;

use hsdp_comm::Reduction;
use hsdp_kernels::adafactor::{
    AdafactorStep, Factored, MatrixRun, ParameterSums, adafactor, add_squares, average_squares,
    average_sums, squared_update,
};
use hsdp_kernels::memory::{self, Category};
use hsdp_kernels::squared_norm;
use hsdp_sharding::{Param, ParamId, UnitId};

use crate::error::Error;
use crate::optimizer::grouped::Grouped;
use crate::optimizer::interface::{ClippedGradient, Run, Updating};
use crate::optimizer::rule::{Rule, RuleExchange, RunState, Setting};
use crate::optimizer::state::{Covered, OptimizerState};
use crate::options::allowed::Allowed;
use crate::persist::checkpointed::{Spread, StateTensor};

/// Adafactor (Shazeer and Stern, arXiv 1804.04235), as PyTorch computes it.
///
/// Each rank keeps an f32 for each row and each column of the last two dims of a parameter, and for
/// parameters of fewer dims an f32 for each element that it updates. An update has two all-reduces
/// over the world: of the sums of squares by row and by column, and of the squares of the update.
/// Each adds up f64 of all ranks' slices, so the bits do not depend on the ranks that update the
/// elements. The model is updated on the host.
pub type Adafactor = Grouped<AdafactorOptions>;

/// The parameters of Adafactor. The defaults are those of PyTorch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdafactorOptions {
    /// The largest relative size of a step, and the rate of the weight decay.
    pub learning_rate: f64,
    /// The power of the step's number that is the weight of new squares, at most 0.
    pub beta2_decay: f64,
    /// The least root of a variance, and the least root mean square of a parameter that counts.
    pub eps: (f64, f64),
    /// The root mean square from which an update is scaled down: PyTorch's `d`.
    pub threshold: f64,
    /// Before the update, the parameters shrink by learning rate x weight decay.
    pub weight_decay: f64,
}

impl Default for AdafactorOptions {
    fn default() -> Self {
        let eps = (f64::from(f32::EPSILON), 1e-3);
        Self { learning_rate: 1e-2, beta2_decay: -0.8, eps, threshold: 1.0, weight_decay: 0.0 }
    }
}

impl AdafactorOptions {
    /// An update, the `step`-th of its parameter.
    fn of_step(&self, step: u64, clip: f32) -> AdafactorStep {
        let Self { learning_rate, beta2_decay, eps, threshold, weight_decay } = *self;
        let (epsilon1, epsilon2) = eps;
        AdafactorStep {
            learning_rate,
            beta2_decay,
            epsilon1,
            epsilon2,
            threshold,
            weight_decay,
            step,
            clip,
        }
    }
}

/// The kinds of state: of the rows and of the columns of parameters of at least two dims, and of
/// each element of other parameters.
const KINDS: &[&str] = &["row_var", "col_var", "variance"];
const ROWS: usize = 0;
const COLUMNS: usize = 1;
const EACH: usize = 2;

/// The elements that are read at a time.
const BLOCK: usize = 4096;

impl Rule for AdafactorOptions {
    const KIND: &'static str = "adafactor";
    const COUNTS: bool = true;
    const COLLECTIVE: bool = true;

    fn options(&mut self, see: &mut dyn FnMut(&'static str, Setting<'_>)) {
        see("learning_rate", Setting::Rate(&mut self.learning_rate));
        see("beta2_decay", Setting::Number(&mut self.beta2_decay, Allowed::NotPositive));
        see("eps.0", Setting::Number(&mut self.eps.0, Allowed::PositiveSquare));
        see("eps.1", Setting::Number(&mut self.eps.1, Allowed::NotNegative));
        see("threshold", Setting::Number(&mut self.threshold, Allowed::Positive));
        see("weight_decay", Setting::Number(&mut self.weight_decay, Allowed::NotNegative));
    }
    fn kinds(&self) -> &'static [&'static str] {
        KINDS
    }

    fn tensors(&self, parameter: ParamId, param: &Param) -> Vec<StateTensor> {
        let tensor = |kind, spread| StateTensor { kind: KINDS[kind], parameter, spread };
        match LastTwoDims::of(param) {
            None => vec![tensor(EACH, Spread::Elements)],
            Some(dims) => vec![
                tensor(ROWS, Spread::Whole(dims.all_rows())),
                tensor(COLUMNS, Spread::Whole(dims.all_columns())),
            ],
        }
    }

    fn exchange(
        RuleExchange { options, state, updating }: RuleExchange<'_, Self>,
    ) -> Result<(), Error> {
        let step_of =
            |id: ParamId| options(id).of_step(state.covered.count(id) + 1, updating.clip());
        let squares = squares(state, updating)?;
        let next = next_factors(state, updating, &squares, step_of)?;
        let updates = squared_updates(state, updating, &next, step_of)?;
        let of_parameter = |id: ParamId| ParameterSums {
            elements: updating.plan().spec()[id].numel(),
            squares: squares.of(id)[0],
            squared_update: updates.of(id)[0],
        };
        let sums = squares.parameters().map(|id| (id, of_parameter(id))).collect();
        state.staged.next = next;
        state.staged.sums = sums;
        Ok(())
    }

    fn update(&self, number: u64, run: Run<'_>, RunState { state, spec, .. }: RunState<'_>) {
        let Run { unit, piece, parameters, gradient } = run;
        let ClippedGradient { values: gradient, clip } = gradient;
        let parameter = ParamId { unit, index: piece.param };
        let step = self.of_step(number, clip);
        let sums = &state.staged.sums[&parameter];
        if let Some(dims) = LastTwoDims::of(&spec[parameter]) {
            let [rows, columns] = [ROWS, COLUMNS].map(|kind| state.kinds[kind].whole(parameter));
            let estimate = dims.estimate(&step, rows, columns);
            let variance = estimate.from(piece.param_start);
            return adafactor(&step, sums, parameters, gradient, variance);
        }
        let moments = state.kinds[EACH].of_run_mut(unit, &piece);
        average_squares(&step, moments, gradient);
        adafactor(&step, sums, parameters, gradient, step.each(moments));
    }
}

/// The moments of rows and columns after an update, by kind and parameter.
type NextFactors = BTreeMap<(usize, ParamId), Vec<f32>>;

/// Sums the squares of each parameter's elements, and of its gradient by row and by column.
fn squares(state: &OptimizerState, updating: &Updating<'_>) -> Result<SquareSums, Error> {
    let spec = updating.plan().spec();
    let factored = |dims: LastTwoDims| dims.all_rows() + dims.all_columns();
    let len = |id| 1 + LastTwoDims::of(&spec[id]).map_or(0, factored);
    let mut sums = SquareSums::zeros(updating, state.covered.parameters(), len)?;
    each_block(updating, |parameter, block| {
        let [own, factored @ ..] = sums.of_mut(parameter) else { unreachable!("at least one") };
        *own += squared_norm(block.parameters);
        if let Some(dims) = LastTwoDims::of(&spec[parameter]) {
            let (rows, columns) = factored.split_at_mut(dims.all_rows());
            let run = MatrixRun { start: block.start, rows: dims.rows, columns: dims.columns };
            add_squares(run, block.gradient, updating.clip(), [rows, columns]);
        }
        Ok(())
    })?;
    sums.all_reduced(&state.covered, updating)
}

/// Computes the moments of rows and columns after the update.
fn next_factors(
    state: &OptimizerState,
    updating: &Updating<'_>,
    squares: &SquareSums,
    step_of: impl Fn(ParamId) -> AdafactorStep,
) -> Result<NextFactors, Error> {
    let mut next = NextFactors::new();
    for id in squares.parameters() {
        let Some(dims) = LastTwoDims::of(&updating.plan().spec()[id]) else { continue };
        let (rows, columns) = squares.of(id)[1..].split_at(dims.all_rows());
        for (kind, sums, count) in [(ROWS, rows, dims.columns), (COLUMNS, columns, dims.rows)] {
            let now = state.kinds[kind].whole(id);
            let mut moved = updating.site().zeros(Category::Update, id.unit, now.len())?;
            moved.copy_from_slice(now);
            average_sums(&step_of(id), &mut moved, sums, count);
            next.insert((kind, id), moved);
        }
    }
    Ok(next)
}

/// Sums the squares of each parameter's update.
fn squared_updates(
    state: &OptimizerState,
    updating: &Updating<'_>,
    next: &NextFactors,
    step_of: impl Fn(ParamId) -> AdafactorStep,
) -> Result<SquareSums, Error> {
    let spec = updating.plan().spec();
    let mut sums = SquareSums::zeros(updating, state.covered.parameters(), |_| 1)?;
    each_block(updating, |parameter, block| {
        let step = step_of(parameter);
        let sum = match LastTwoDims::of(&spec[parameter]) {
            Some(dims) => {
                let [rows, columns] = [ROWS, COLUMNS].map(|kind| &*next[&(kind, parameter)]);
                let estimate = dims.estimate(&step, rows, columns);
                squared_update(&step, block.gradient, estimate.from(block.start))
            }
            None => {
                let range = block.start..block.start + block.gradient.len();
                let moments = state.elements(updating.site(), KINDS[EACH], parameter, range)?;
                let mut moments = moments.expect("it has no factors").into_owned();
                average_squares(&step, &mut moments, block.gradient);
                squared_update(&step, block.gradient, step.each(&moments))
            }
        };
        sums.of_mut(parameter)[0] += sum;
        Ok(())
    })?;
    sums.all_reduced(&state.covered, updating)
}

/// Consecutive elements of a parameter in this rank's shard.
struct AdafactorBlock<'a> {
    /// The first element, in the parameter.
    start: usize,
    parameters: &'a [f32],
    gradient: &'a [f32],
}

/// Reads the elements of this rank's slices that an optimizer updates, block by block.
fn each_block(
    updating: &Updating<'_>,
    mut act: impl FnMut(ParamId, AdafactorBlock<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut parameters = [0.0; BLOCK];
    let mut gradient = [0.0; BLOCK];
    for (unit, piece) in updating.sliced_pieces() {
        for at in (0..piece.len).step_by(BLOCK) {
            let len = BLOCK.min(piece.len - at);
            let range = piece.shard_start + at..piece.shard_start + at + len;
            updating.parameters(unit, range.clone(), &mut parameters[..len])?;
            let parameter = ParamId { unit, index: piece.param };
            updating.gradient(parameter, range, &mut gradient[..len])?;
            let parameters = &parameters[..len];
            let gradient = &gradient[..len];
            let block = AdafactorBlock { start: piece.param_start + at, parameters, gradient };
            act(parameter, block)?;
        }
    }
    Ok(())
}

/// The sizes of a parameter as a stack of matrices, its last two dims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LastTwoDims {
    count: usize,
    rows: usize,
    columns: usize,
}

impl LastTwoDims {
    /// Returns the sizes of a parameter of at least two dims. `None` for another one.
    fn of(param: &Param) -> Option<Self> {
        let [before @ .., rows, columns] = &param.shape[..] else { return None };
        Some(Self { count: before.iter().product(), rows: *rows, columns: *columns })
    }

    /// Returns the rows of all matrices.
    fn all_rows(self) -> usize {
        self.count * self.rows
    }

    /// Returns the columns of all matrices.
    fn all_columns(self) -> usize {
        self.count * self.columns
    }

    /// Returns the estimate of variances from the moments of all rows and of all columns.
    fn estimate<'a>(
        self,
        step: &AdafactorStep,
        rows: &'a [f32],
        columns: &'a [f32],
    ) -> Factored<'a> {
        Factored::new(step, [rows, columns], self.rows, self.columns)
    }
}

/// The sums of squares of all parameters that an optimizer updates, one after the other, in f64.
#[derive(Debug, Default)]
struct SquareSums {
    /// By parameter: the place of its sums.
    places: BTreeMap<ParamId, Range<usize>>,
    values: Vec<f64>,
}

impl SquareSums {
    /// Zeros: `len` of them for each parameter that is updated now.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    fn zeros(
        updating: &Updating<'_>,
        parameters: impl Iterator<Item = ParamId>,
        len: impl Fn(ParamId) -> usize,
    ) -> Result<Self, Error> {
        let mut sums = Self::default();
        let mut at = 0;
        for parameter in parameters.filter(|parameter| updating.updates(*parameter)) {
            let end = at + len(parameter);
            sums.places.insert(parameter, at..end);
            at = end;
        }
        let zeros = {
            let _update = memory::scope(Category::Update);
            hsdp_kernels::zeros(at)
        };
        let first = sums.parameters().next().map_or(UnitId::new(0), |first| first.unit);
        sums.values = zeros.map_err(|error| updating.site().memory(first, error))?;
        Ok(sums)
    }

    fn of(&self, parameter: ParamId) -> &[f64] {
        &self.values[self.places[&parameter].clone()]
    }

    fn of_mut(&mut self, parameter: ParamId) -> &mut [f64] {
        &mut self.values[self.places[&parameter].clone()]
    }

    fn parameters(&self) -> impl Iterator<Item = ParamId> {
        self.places.keys().copied()
    }

    /// Adds the sums up over the world.
    fn all_reduced(mut self, covered: &Covered, updating: &Updating<'_>) -> Result<Self, Error> {
        let context = updating.context;
        let tag = context.tag_of_update(covered.parameters().next(), updating.gradients.step);
        let values = std::mem::take(&mut self.values);
        self.values = context.over_world().all_reduce(tag, Reduction::Sum, values)?.wait()?;
        Ok(self)
    }
}
