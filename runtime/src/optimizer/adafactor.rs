//! Adafactor: a second moment that is factored along the rows and the columns of a matrix.

mod moments;
mod options;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::Range;

use hsdp_checkpoint::OptimizerHead;
use hsdp_comm::{Reduction, Stage};
use hsdp_kernels::adafactor::{
    AdafactorStep, MatrixRun, ParameterSums, Variance, adafactor, add_squares, average_squares,
    squared_update,
};
use hsdp_kernels::cuda::CudaError;
use hsdp_kernels::squared_norm;
use hsdp_sharding::{ModelSpec, Param, ParamId};

use self::moments::{Factors, Sizes, Sums};
pub use self::options::AdafactorOptions;
use crate::checkpoint::{Checkpointed, Expected, Problem, SavedState, Spread, StateTensor};
use crate::engine::fabric::Fabric;
use crate::error::Error;
use crate::model::{ModelId, ShardedModel};
use crate::optimizer::covered::Covered;
use crate::optimizer::groups::Groups;
use crate::optimizer::held::Held as EachHeld;
use crate::optimizer::rule::OptimizerOptions;
use crate::optimizer::state::Of;
use crate::optimizer::{DeviceRun, Optimizer, Run, Updating};

/// Adafactor (Shazeer and Stern, arXiv 1804.04235), as PyTorch computes it.
///
/// Each rank of a shard group keeps an f32 for each row and each column of the last two dims of a parameter, and for parameters of fewer
/// dims an f32 for each element of its shard. An update has two all-reduces over the shard group: of the sums of squares by row and by
/// column, and of the squares of the update. Each adds up f64.
#[derive(Debug)]
pub struct Adafactor {
    model: ModelId,
    groups: Groups<AdafactorOptions>,
    held: Option<Held>,
    staged: Staged,
}

#[derive(Debug)]
struct Held {
    /// All parameters that this optimizer updates.
    covered: Covered,
    factors: BTreeMap<ParamId, Factors>,
    /// The second moment of each element of parameters of fewer than two dims.
    each: EachHeld,
}

/// The results of the exchanges of a step, until they are applied.
#[derive(Debug, Default)]
struct Staged {
    factors: BTreeMap<ParamId, Factors>,
    sums: BTreeMap<ParamId, ParameterSums>,
}

const ROWS: &str = "row_var";
const COLUMNS: &str = "col_var";
const EACH: &[&str] = &["variance"];

/// The elements that are read at a time.
const BLOCK: usize = 4096;

impl Adafactor {
    /// An optimizer for this rank's shards of `model`.
    #[must_use]
    pub fn new(model: &ShardedModel, options: AdafactorOptions) -> Self {
        let groups = Groups::none(model, options);
        Self { model: model.id().clone(), groups, held: None, staged: Staged::default() }
    }

    /// Gives a group of parameters options of its own, as [`Elementwise::group`](crate::Elementwise::group) does.
    #[must_use]
    pub fn group(
        self,
        has: impl Fn(&Param) -> bool,
        change: impl FnOnce(AdafactorOptions) -> AdafactorOptions,
    ) -> Self {
        Self { groups: self.groups.with(has, change), ..self }
    }

    /// Sets the learning rate of a group, as [`Elementwise::set_learning_rate_of`](crate::Elementwise::set_learning_rate_of) does.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn set_learning_rate_of(&mut self, group: usize, rate: f64) {
        self.groups.set_learning_rate_of(group, rate);
    }

    /// The next update of a parameter.
    fn next_step(&self, parameter: ParamId, clip: f32) -> AdafactorStep {
        let held = self.held.as_ref().expect("`check` has made it");
        let options = self.groups.of(parameter.unit, parameter.index);
        options.of_step(held.covered.count(parameter) + 1, clip)
    }

    /// The sums of the squares of each parameter's elements, and of its gradient by row and by column.
    fn squares(&self, updating: &Updating<'_>) -> Result<Sums, Error> {
        let held = self.held.as_ref().expect("`check` has made it");
        let len = |id| {
            held.factors.get(&id).map_or(1, |it| 1 + it.sizes.all_rows() + it.sizes.all_columns())
        };
        let mut sums = Sums::zeros(updating, held.covered.parameters(), len);
        each_block(updating, |parameter, block| {
            let [own, factored @ ..] = sums.of_mut(parameter) else { unreachable!("at least one") };
            *own += squared_norm(block.parameters);
            if let Some(Factors { sizes, .. }) = held.factors.get(&parameter) {
                let (rows, columns) = factored.split_at_mut(sizes.all_rows());
                let Sizes { rows: in_matrix, columns: width, .. } = *sizes;
                let run = MatrixRun { start: block.start, rows: in_matrix, columns: width };
                add_squares(run, block.gradient, updating.clip(), [rows, columns]);
            }
            Ok(())
        })?;
        all_reduced(updating, sums)
    }

    /// The sums of the squares of each parameter's update.
    fn squared_updates(
        &self,
        updating: &Updating<'_>,
        factors: &BTreeMap<ParamId, Factors>,
    ) -> Result<Sums, Error> {
        let held = self.held.as_ref().expect("`check` has made it");
        let mut sums = Sums::zeros(updating, held.covered.parameters(), |_| 1);
        each_block(updating, |parameter, block| {
            let step = self.next_step(parameter, updating.clip());
            let sum = match factors.get(&parameter) {
                Some(factors) => {
                    let estimate = factors.estimate(&step);
                    squared_update(&step, block.gradient, estimate.from(block.start))
                }
                None => {
                    let range = block.start..block.start + block.gradient.len();
                    let state = held.each.state(updating.fabric, (EACH[0], parameter), range)?;
                    let mut moments = state.expect("it has no factors").into_owned();
                    average_squares(&step, &mut moments, block.gradient);
                    squared_update(&step, block.gradient, step.each(&moments))
                }
            };
            sums.of_mut(parameter)[0] += sum;
            Ok(())
        })?;
        all_reduced(updating, sums)
    }
}

/// Consecutive elements of a parameter in this rank's shard.
struct Block<'a> {
    /// The first element, in the parameter.
    start: usize,
    parameters: &'a [f32],
    gradient: &'a [f32],
}

/// Reads all elements that an optimizer updates on this rank, block by block.
fn each_block(
    updating: &Updating<'_>,
    mut act: impl FnMut(ParamId, Block<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
    let (mut parameters, mut gradient) = ([0.0; BLOCK], [0.0; BLOCK]);
    for (unit, piece) in updating.pieces() {
        for at in (0..piece.len).step_by(BLOCK) {
            let len = BLOCK.min(piece.len - at);
            let range = piece.shard_start + at..piece.shard_start + at + len;
            updating.parameters(unit, range.clone(), &mut parameters[..len])?;
            updating.gradient(unit, range, &mut gradient[..len])?;
            let (parameters, gradient) = (&parameters[..len], &gradient[..len]);
            let block = Block { start: piece.param_start + at, parameters, gradient };
            act(ParamId { unit, index: piece.param }, block)?;
        }
    }
    Ok(())
}

/// The sums over the shard group.
fn all_reduced(updating: &Updating<'_>, mut sums: Sums) -> Result<Sums, Error> {
    let fabric = updating.fabric;
    let tag = fabric.tag(None, Stage::Update, updating.gradients.step, 0);
    let values = std::mem::take(&mut sums.values);
    sums.values = fabric.reduce.all_reduce(tag, Reduction::Sum, values)?.wait()?;
    Ok(sums)
}

impl Held {
    fn zeros(fabric: &Fabric, of: Of, has: impl Fn(ParamId) -> bool) -> Result<Self, Error> {
        let factors = Factors::of_all(fabric, of, &has)?;
        let each = EachHeld::zeros(fabric, (EACH, of), |id| has(id) && !factors.contains_key(&id))?;
        Ok(Self { covered: Covered::of(fabric, has), factors, each })
    }

    fn tensors(&self) -> Vec<StateTensor> {
        let factored = self.factors.iter().flat_map(|(id, it)| tensors_of(*id, it.sizes));
        factored.chain(self.each.tensors()).collect()
    }
}

fn tensors_of(parameter: ParamId, sizes: Sizes) -> [StateTensor; 2] {
    let tensor = |kind, len| StateTensor { kind, parameter, spread: Spread::Whole(len) };
    [tensor(ROWS, sizes.all_rows()), tensor(COLUMNS, sizes.all_columns())]
}

impl Optimizer for Adafactor {
    fn is_collective(&self) -> bool {
        true
    }

    fn check(&mut self, updating: &Updating<'_>, lines: &mut String) -> Result<(), Error> {
        updating.check_owner(&self.model)?;
        self.groups.check()?;
        if updating.is_on_device() {
            let what = "adafactor cannot update a model on a device: place it on the host";
            return Err(updating.misuse(what.to_owned()));
        }
        write!(lines, "{}", self.groups.lines()).expect("options have texts");
        match &self.held {
            Some(held) => held.covered.check(AdafactorOptions::KIND, updating),
            None => {
                let of = ("optimizer step", updating.gradients.step);
                self.held = Some(Held::zeros(updating.fabric, of, |id| updating.has(id))?);
                Ok(())
            }
        }
    }

    fn prepare(&mut self, updating: &Updating<'_>) -> Result<(), Error> {
        let squares = self.squares(updating)?;
        let held = self.held.as_ref().expect("`check` has made it");
        let moved = |(id, factors): (&ParamId, &Factors)| {
            let [_, factored @ ..] = squares.of(*id) else { unreachable!("at least one") };
            let (rows, columns) = factored.split_at(factors.sizes.all_rows());
            (*id, factors.moved(&self.next_step(*id, updating.clip()), [rows, columns]))
        };
        let now = held.factors.iter().filter(|(id, _)| updating.updates(**id));
        let factors: BTreeMap<_, _> = now.map(moved).collect();
        let updates = self.squared_updates(updating, &factors)?;
        let of_parameter = |id: ParamId| ParameterSums {
            elements: updating.plan().spec()[id].numel(),
            squares: squares.of(id)[0],
            squared_update: updates.of(id)[0],
        };
        let sums = squares.parameters().map(|id| (id, of_parameter(id))).collect();
        self.staged = Staged { factors, sums };
        Ok(())
    }

    fn begin(&mut self, updating: &Updating<'_>) {
        let held = self.held.as_mut().expect("`check` has made it");
        held.covered.begin(updating);
        for (id, moved) in std::mem::take(&mut self.staged.factors) {
            let factors = held.factors.get_mut(&id).expect("it has moved from there");
            let moments = factors.moments.iter_mut().zip(&moved.moments);
            moments.for_each(|(into, moved)| into.copy_from_slice(moved));
        }
    }

    fn update(&mut self, run: Run<'_>) {
        let Run { unit, piece, parameters, gradient, clip } = run;
        let held = self.held.as_mut().expect("`check` has made it");
        let parameter = ParamId { unit, index: piece.param };
        let step = self.groups.of(unit, piece.param);
        let step = step.of_step(held.covered.count(parameter), clip);
        let sums = &self.staged.sums[&parameter];
        if let Some(factors) = held.factors.get(&parameter) {
            let estimate = factors.estimate(&step);
            let variance = estimate.from(piece.param_start);
            return adafactor(&step, sums, parameters, (gradient, variance));
        }
        let moments = held.each.host(unit, &piece);
        average_squares(&step, moments, gradient);
        let variance: Variance<'_> = step.each(moments);
        adafactor(&step, sums, parameters, (gradient, variance));
    }

    fn update_on_device(&mut self, _: DeviceRun<'_>) -> Result<(), CudaError> {
        unreachable!("an update by adafactor on a device is refused")
    }

    fn set_learning_rate(&mut self, rate: f64) {
        self.groups.set_learning_rate(rate);
    }
}

impl Checkpointed for Adafactor {
    fn head(&self, spec: &ModelSpec) -> OptimizerHead {
        let updates = self.held.iter().flat_map(|held| held.covered.counts(spec)).collect();
        let kind = AdafactorOptions::KIND.to_owned();
        OptimizerHead { kind, options: self.groups.json(), updates }
    }

    fn is_of(&self, model: &ModelId) -> bool {
        self.model == *model
    }

    fn tensors(&self) -> Vec<StateTensor> {
        self.held.as_ref().map_or_else(Vec::new, Held::tensors)
    }

    fn expected(&self, saved: &SavedState<'_>) -> Expected {
        let counted = saved.parameters_with(&[ROWS, COLUMNS, EACH[0]]);
        let of = |id: &ParamId| match Sizes::of(saved.parameter(*id)) {
            Some(sizes) => tensors_of(*id, sizes).to_vec(),
            None => {
                let (kind, spread) = (EACH[0], Spread::Elements);
                vec![StateTensor { kind, parameter: *id, spread }]
            }
        };
        Expected { tensors: counted.iter().flat_map(of).collect(), counted }
    }

    fn state<'a>(
        &'a self,
        model: &ShardedModel,
        (kind, parameter): (&str, ParamId),
        range: Range<usize>,
    ) -> Result<Option<Cow<'a, [f32]>>, Error> {
        let Some(held) = &self.held else { return Ok(None) };
        let factors = held.factors.get(&parameter).map(|it| &it.moments);
        match (factors, kind) {
            (Some([rows, _]), ROWS) => Ok(Some(Cow::Borrowed(&rows[range]))),
            (Some([_, columns]), COLUMNS) => Ok(Some(Cow::Borrowed(&columns[range]))),
            _ => held.each.state(&model.engine.fabric, (kind, parameter), range),
        }
    }

    fn restored(&self, model: &ShardedModel, saved: &SavedState<'_>) -> Result<Self, Problem> {
        let has = saved.parameters_with(&[ROWS, COLUMNS, EACH[0]]);
        let mut restored = Self {
            model: self.model.clone(),
            groups: self.groups.clone(),
            held: None,
            staged: Staged::default(),
        };
        if has.is_empty() {
            return Ok(restored);
        }
        let (fabric, of) = (&model.engine.fabric, ("loading", model.committed_steps()));
        let mut held = Held::zeros(fabric, of, |id| has.contains(&id))?;
        held.covered.read(saved);
        held.each.read(fabric, saved)?;
        for (id, factors) in &mut held.factors {
            let [rows, columns] = &mut factors.moments;
            saved.read((ROWS, *id), 0, rows)?;
            saved.read((COLUMNS, *id), 0, columns)?;
        }
        restored.held = Some(held);
        Ok(restored)
    }
}
