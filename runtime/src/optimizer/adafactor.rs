//! Adafactor: a second moment that is factored along the rows and the columns of a matrix.

mod moments;
mod options;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use hsdp_comm::Reduction;
use hsdp_kernels::adafactor::{
    AdafactorStep, MatrixRun, ParameterSums, Variance, adafactor, add_squares, average_squares,
    squared_update,
};
use hsdp_kernels::squared_norm;
use hsdp_sharding::{Param, ParamId};

use self::moments::{Factors, Sizes, Sums};
pub use self::options::AdafactorOptions;
use crate::error::Error;
use crate::model::ShardedModel;
use crate::optimizer::covered::Covered;
use crate::optimizer::grouped::Grouped;
use crate::optimizer::groups::Groups;
use crate::optimizer::held::{Held, Kinds, tensors_of};
use crate::optimizer::method::{Kept, Method, Traits, Updates};
use crate::optimizer::options::OptimizerOptions as _;
use crate::optimizer::run::Run;
use crate::optimizer::updating::Updating;
use crate::persist::checkpointed::{Spread, StateTensor};
use crate::persist::problem::Problem;
use crate::persist::saved::StateSource;
use crate::state::context::{Context, ErrorSite};

/// Adafactor (Shazeer and Stern, arXiv 1804.04235), as PyTorch computes it.
///
/// Each rank of a shard group keeps an f32 for each row and each column of the last two dims of a parameter, and for parameters of fewer
/// dims an f32 for each element of its shard. An update has two all-reduces over the shard group: of the sums of squares by row and by
/// column, and of the squares of the update. Each adds up f64.
pub type Adafactor = Grouped<AdafactorOptions>;

impl Adafactor {
    /// An optimizer for this rank's shards of a model on the host.
    #[must_use]
    pub fn new(model: &ShardedModel, options: AdafactorOptions) -> Self {
        Self::of(model, &Factorization, options)
    }
}

/// The method of Adafactor.
#[derive(Debug)]
struct Factorization;

/// The second moments of Adafactor.
#[derive(Debug)]
struct FactoredMoments {
    /// All parameters that this optimizer updates.
    covered: Covered,
    factors: BTreeMap<ParamId, Factors>,
    /// The second moment of each element of parameters of fewer than two dims.
    each: Held,
    staged: Staged,
}

/// The results of the exchanges of a step, until they are applied.
#[derive(Debug, Default)]
struct Staged {
    factors: BTreeMap<ParamId, Factors>,
    sums: BTreeMap<ParamId, ParameterSums>,
}

const ROWS: &str = "row_var";
const COLUMNS: &str = "col_var";
const EACH: &str = "variance";

/// The elements that are read at a time.
const BLOCK: usize = 4096;

impl FactoredMoments {
    /// The sums of the squares of each parameter's elements, and of its gradient by row and by column.
    fn squares(&self, updating: &Updating<'_>) -> Result<Sums, Error> {
        let len = |id| {
            self.factors.get(&id).map_or(1, |it| 1 + it.sizes.all_rows() + it.sizes.all_columns())
        };
        let mut sums = Sums::zeros(updating, self.covered.parameters(), len)?;
        each_block(updating, |parameter, block| {
            let [own, factored @ ..] = sums.of_mut(parameter) else { unreachable!("at least one") };
            *own += squared_norm(block.parameters);
            if let Some(Factors { sizes, .. }) = self.factors.get(&parameter) {
                let (rows, columns) = factored.split_at_mut(sizes.all_rows());
                let Sizes { rows: in_matrix, columns: width, .. } = *sizes;
                let run = MatrixRun { start: block.start, rows: in_matrix, columns: width };
                add_squares(run, block.gradient, updating.clip(), [rows, columns]);
            }
            Ok(())
        })?;
        self.all_reduced(updating, sums)
    }

    /// The sums of the squares of each parameter's update.
    fn squared_updates(
        &self,
        updating: &Updating<'_>,
        next: impl Fn(ParamId) -> AdafactorStep,
        factors: &BTreeMap<ParamId, Factors>,
    ) -> Result<Sums, Error> {
        let mut sums = Sums::zeros(updating, self.covered.parameters(), |_| 1)?;
        each_block(updating, |parameter, block| {
            let step = next(parameter);
            let sum = match factors.get(&parameter) {
                Some(factors) => {
                    let estimate = factors.estimate(&step);
                    squared_update(&step, block.gradient, estimate.from(block.start))
                }
                None => {
                    let range = block.start..block.start + block.gradient.len();
                    let state = self.each.elements(updating.context, (EACH, parameter), range)?;
                    let mut moments = state.expect("it has no factors").into_owned();
                    average_squares(&step, &mut moments, block.gradient);
                    squared_update(&step, block.gradient, step.each(&moments))
                }
            };
            sums.of_mut(parameter)[0] += sum;
            Ok(())
        })?;
        self.all_reduced(updating, sums)
    }
}

impl FactoredMoments {
    /// Adds sums up over the shard group.
    fn all_reduced(&self, updating: &Updating<'_>, mut sums: Sums) -> Result<Sums, Error> {
        let context = updating.context;
        let first = self.covered.parameters().next();
        let tag = context.tag_of_update(first, updating.gradients.step);
        let values = std::mem::take(&mut sums.values);
        sums.values = context.reduce.all_reduce(tag, Reduction::Sum, values)?.wait()?;
        Ok(sums)
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
            let parameter = ParamId { unit, index: piece.param };
            updating.gradient(parameter, range, &mut gradient[..len])?;
            let (parameters, gradient) = (&parameters[..len], &gradient[..len]);
            let block = Block { start: piece.param_start + at, parameters, gradient };
            act(parameter, block)?;
        }
    }
    Ok(())
}

impl Kept for FactoredMoments {
    fn covered(&self) -> &Covered {
        &self.covered
    }

    fn covered_mut(&mut self) -> &mut Covered {
        &mut self.covered
    }

    fn elements<'a>(
        &'a self,
        context: &Context,
        (kind, parameter): (&str, ParamId),
        range: Range<usize>,
    ) -> Result<Option<Cow<'a, [f32]>>, Error> {
        let factors = self.factors.get(&parameter).map(|it| &it.moments);
        match (factors, kind) {
            (Some([rows, _]), ROWS) => Ok(Some(Cow::Borrowed(&rows[range]))),
            (Some([_, columns]), COLUMNS) => Ok(Some(Cow::Borrowed(&columns[range]))),
            _ => self.each.elements(context, (kind, parameter), range),
        }
    }

    fn read(&mut self, context: &Context, saved: &dyn StateSource) -> Result<(), Problem> {
        self.each.read(context, saved)?;
        self.factors.iter_mut().try_for_each(|(id, factors)| {
            let [rows, columns] = &mut factors.moments;
            saved.read((ROWS, *id), 0, rows)?;
            saved.read((COLUMNS, *id), 0, columns)
        })
    }
}

impl Method<AdafactorOptions> for Factorization {
    fn kind(&self) -> &'static str {
        AdafactorOptions::KIND
    }

    fn traits(&self) -> Traits {
        Traits { counts: true, is_collective: true, on_device: false }
    }

    fn kinds(&self, _: &AdafactorOptions) -> Kinds {
        &[ROWS, COLUMNS, EACH]
    }

    fn tensors(&self, _: &AdafactorOptions, parameter: ParamId, param: &Param) -> Vec<StateTensor> {
        let Some(sizes) = Sizes::of(param) else { return tensors_of(&[EACH], parameter) };
        let tensor = |kind, len| StateTensor { kind, parameter, spread: Spread::Whole(len) };
        vec![tensor(ROWS, sizes.all_rows()), tensor(COLUMNS, sizes.all_columns())]
    }

    fn zeros(
        &self,
        _: &Groups<AdafactorOptions>,
        site: ErrorSite<'_>,
        has: &dyn Fn(ParamId) -> bool,
    ) -> Result<Box<dyn Updates<AdafactorOptions>>, Error> {
        let factors = Factors::of_all(site, has)?;
        let each = |id| has(id) && !factors.contains_key(&id);
        let each = Held::zeros(site, &[EACH], each)?;
        let covered = Covered::of(site.context, has);
        Ok(Box::new(FactoredMoments { covered, factors, each, staged: Staged::default() }))
    }
}

impl Updates<AdafactorOptions> for FactoredMoments {
    fn prepare(
        &mut self,
        groups: &Groups<AdafactorOptions>,
        updating: &Updating<'_>,
    ) -> Result<(), Error> {
        let next = |id: ParamId| {
            groups.of(id.unit, id.index).of_step(self.covered.count(id) + 1, updating.clip())
        };
        let squares = self.squares(updating)?;
        let moved = |(id, factors): (&ParamId, &Factors)| {
            let [_, factored @ ..] = squares.of(*id) else { unreachable!("at least one") };
            let (rows, columns) = factored.split_at(factors.sizes.all_rows());
            let moved = factors.moved(&next(*id), [rows, columns]);
            Ok((*id, moved.map_err(|error| updating.site().memory(id.unit, error))?))
        };
        let now = self.factors.iter().filter(|(id, _)| updating.updates(**id));
        let factors = now.map(moved).collect::<Result<BTreeMap<_, _>, Error>>()?;
        let updates = self.squared_updates(updating, next, &factors)?;
        let of_parameter = |id: ParamId| ParameterSums {
            elements: updating.plan().spec()[id].numel(),
            squares: squares.of(id)[0],
            squared_update: updates.of(id)[0],
        };
        let sums = squares.parameters().map(|id| (id, of_parameter(id))).collect();
        self.staged = Staged { factors, sums };
        Ok(())
    }

    fn begin(&mut self, _: &Updating<'_>) {
        for (id, moved) in std::mem::take(&mut self.staged.factors) {
            let factors = self.factors.get_mut(&id).expect("it has moved from there");
            let moments = factors.moments.iter_mut().zip(&moved.moments);
            moments.for_each(|(into, moved)| into.copy_from_slice(moved));
        }
    }

    fn update(&mut self, groups: &Groups<AdafactorOptions>, run: Run<'_>) {
        let Run { unit, piece, parameters, gradient, clip } = run;
        let parameter = ParamId { unit, index: piece.param };
        let step = groups.of(unit, piece.param).of_step(self.covered.count(parameter), clip);
        let sums = &self.staged.sums[&parameter];
        if let Some(factors) = self.factors.get(&parameter) {
            let estimate = factors.estimate(&step);
            let variance = estimate.from(piece.param_start);
            return adafactor(&step, sums, parameters, (gradient, variance));
        }
        let moments = self.each.host(unit, &piece);
        average_squares(&step, moments, gradient);
        let variance: Variance<'_> = step.each(moments);
        adafactor(&step, sums, parameters, (gradient, variance));
    }
}
