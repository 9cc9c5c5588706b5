//! Muon: the momentum of a matrix is orthogonalized, as a whole, by its owner.

mod options;

use std::borrow::Cow;
use std::fmt::Write as _;
use std::ops::Range;

use hsdp_checkpoint::OptimizerHead;
use hsdp_kernels::cuda::CudaError;
use hsdp_kernels::{NewtonSchulz, Threads};
use hsdp_sharding::{ModelSpec, Param, ParamId, Part, Piece, WholeMatrix, Wholes};

pub use self::options::{MuonOptions, RateScale};

use crate::checkpoint::{Checkpointed, Expected, Problem, SavedState, StateTensor};
use crate::error::Error;
use crate::model::{ModelId, ShardedModel};
use crate::optimizer::groups::Groups;
use crate::optimizer::held::{Held, Kinds, tensors_of};
use crate::optimizer::rule::OptimizerOptions as _;
use crate::optimizer::whole::{Exchange, OnOwner};
use crate::optimizer::{DeviceRun, Optimizer, Run, Updating};

/// Muon (K. Jordan et al., 2024; Liu et al., arXiv 2502.16982) for matrices, with an f32 of state for each element of this rank's shards.
///
/// Each [matrix](Param::as_matrices) has an owner in its shard group ([`Owners`](hsdp_sharding::Owners)). An update brings the momentum of
/// each matrix to its owner, which orthogonalizes it, and brings the result back: one all_to_all there, and one back, over the shard
/// group. Each replica computes the same. No parameter and no state changes before all results have come.
///
/// It is for the matrices inside of a model. Embeddings, the last layer, and parameters that are no matrices have another optimizer:
///
/// ```
/// use hsdp::prelude::*;
/// # fn step(model: &mut ShardedModel, gradients: hsdp::Gradients) -> Result<(), hsdp::Error> {
/// let is_matrix = |param: &Param| param.name.contains("layers") && param.as_matrices().is_some();
/// let the_rest = |param: &Param| !(param.name.contains("layers") && param.as_matrices().is_some());
/// let mut muon = hsdp::Muon::new(model, hsdp::MuonOptions::default());
/// let mut adamw = AdamW::new(model, AdamWOptions::default());
/// model.update_by(gradients, [(&mut muon, is_matrix), (&mut adamw, the_rest)])?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Muon {
    model: ModelId,
    groups: Groups<MuonOptions>,
    held: Option<Held>,
    exchange: Option<Exchange>,
    staged: Staged,
}

/// The orthogonalized directions of a step, until the last one is applied.
#[derive(Debug, Default)]
struct Staged {
    /// In the order in which the parts were sent.
    values: Vec<f32>,
    /// The elements that are still to be updated.
    left: usize,
}

const KINDS: Kinds = &["muon_momentum"];

impl Muon {
    /// An optimizer for matrices of `model`.
    #[must_use]
    pub fn new(model: &ShardedModel, options: MuonOptions) -> Self {
        let groups = Groups::none(model, options);
        Self::of(model.id().clone(), groups, None)
    }

    fn of(model: ModelId, groups: Groups<MuonOptions>, held: Option<Held>) -> Self {
        Self { model, groups, held, exchange: None, staged: Staged::default() }
    }

    /// Gives a group of parameters options of its own, as [`Elementwise::group`](crate::Elementwise::group) does.
    #[must_use]
    pub fn group(
        self,
        has: impl Fn(&Param) -> bool,
        change: impl FnOnce(MuonOptions) -> MuonOptions,
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

    fn options_of(&self, part: &Part, exchange: &Exchange) -> &MuonOptions {
        let ParamId { unit, index } = exchange.matrix(part).param;
        self.groups.of(unit, index)
    }
}

/// A part, as a piece of its unit's shard.
fn piece_of(exchange: &Exchange, part: &Part) -> Piece {
    let matrix = exchange.matrix(part);
    Piece {
        param: matrix.param.index,
        param_start: matrix.start + part.start,
        len: part.shard.len(),
        shard_start: part.shard.start,
    }
}

impl Optimizer for Muon {
    fn is_collective(&self) -> bool {
        true
    }

    fn check(&mut self, updating: &Updating<'_>, lines: &mut String) -> Result<(), Error> {
        updating.check_owner(&self.model)?;
        self.groups.check()?;
        if updating.is_on_device() {
            let what = "muon has no matrix product on a device: place the model on the host";
            return Err(updating.misuse(what.to_owned()));
        }
        if self.exchange.is_none() {
            self.exchange =
                Some(Exchange::of(updating.fabric, (Wholes::Matrices, 1), |id| updating.has(id))?);
        }
        write!(lines, "{}", self.groups.lines()).expect("options have texts");
        Held::of(&mut self.held, updating, (MuonOptions::KIND, KINDS))
    }

    fn prepare(&mut self, updating: &Updating<'_>) -> Result<(), Error> {
        let exchange = self.exchange.as_ref().expect("`check` has made it");
        let held = self.held.as_ref().expect("`check` has made it");
        let fill = |part: &Part, direction: &mut [f32]| {
            updating.gradient(part.unit, part.shard.clone(), direction)?;
            let step = self.options_of(part, exchange);
            let step = step.of_step(exchange.matrix(part), updating.clip());
            let place = held.place(part.unit, &piece_of(exchange, part));
            let momentum = held.states[0].of_host(part.unit, place);
            hsdp_kernels::muon_direction(&step, direction, momentum);
            Ok(())
        };
        let of = (updating.fabric, updating.gradients.step);
        let workspace = |it: &WholeMatrix| NewtonSchulz::workspace(it.rows, it.columns);
        let values =
            exchange.run(of, fill, workspace, |OnOwner { matrix, copies, workspace }| {
                let WholeMatrix { param, rows, columns, .. } = *matrix;
                let by = self.groups.of(param.unit, param.index).newton_schulz;
                by.orthogonalize(copies, (rows, columns), workspace, Threads::Pool);
            })?;
        self.staged = Staged { values, left: 0 };
        Ok(())
    }

    fn begin(&mut self, updating: &Updating<'_>) {
        self.held.as_mut().expect("`check` has made it").covered.begin(updating);
        self.staged.left = updating.pieces().map(|(_, piece)| piece.len).sum();
    }

    fn update(&mut self, run: Run<'_>) {
        let Run { unit, piece, parameters, gradient, clip } = run;
        let Self { groups, held, exchange, staged, .. } = self;
        let (exchange, held) = (exchange.as_ref(), held.as_mut());
        let exchange = exchange.expect("`check` has made it");
        let held = held.expect("`check` has made it");
        let momentum = held.host(unit, &piece);
        let options = groups.of(unit, piece.param);
        for (part, range, place) in exchange.within(unit, &piece) {
            let step = options.of_step(exchange.matrix(part), clip);
            let parameters = &mut parameters[range.clone()];
            let sources = [&gradient[range.clone()], &staged.values[place]];
            hsdp_kernels::muon(&step, parameters, sources, &mut momentum[range]);
        }
        staged.left -= piece.len;
        if staged.left == 0 {
            *staged = Staged::default();
        }
    }

    fn update_on_device(&mut self, _: DeviceRun<'_>) -> Result<(), CudaError> {
        unreachable!("an update by muon on a device is refused")
    }

    fn set_learning_rate(&mut self, rate: f64) {
        self.groups.set_learning_rate(rate);
    }
}

impl Checkpointed for Muon {
    fn head(&self, _: &ModelSpec) -> OptimizerHead {
        let (kind, updates) = (MuonOptions::KIND.to_owned(), Default::default());
        OptimizerHead { kind, options: self.groups.json(), updates }
    }

    fn is_of(&self, model: &ModelId) -> bool {
        self.model == *model
    }

    fn tensors(&self) -> Vec<StateTensor> {
        self.held.as_ref().map_or_else(Vec::new, Held::tensors)
    }

    fn expected(&self, saved: &SavedState<'_>) -> Expected {
        let parameters = saved.parameters_with(KINDS).into_iter();
        Expected { tensors: tensors_of(KINDS, parameters), counted: Vec::new() }
    }

    fn state<'a>(
        &'a self,
        model: &ShardedModel,
        of: (&str, ParamId),
        range: Range<usize>,
    ) -> Result<Option<Cow<'a, [f32]>>, Error> {
        let Some(held) = &self.held else { return Ok(None) };
        held.state(&model.engine.fabric, of, range)
    }

    fn copy_state(
        &self,
        model: &ShardedModel,
        of: (&str, ParamId),
        into: (usize, &mut [f32]),
    ) -> Result<bool, Error> {
        let Some(held) = &self.held else { return Ok(false) };
        held.copy_state(&model.engine.fabric, of, into)
    }

    fn restored(&self, model: &ShardedModel, saved: &SavedState<'_>) -> Result<Self, Problem> {
        let of = (KINDS, model.committed_steps());
        let held = Held::restored(&model.engine.fabric, of, saved)?;
        Ok(Self::of(self.model.clone(), self.groups.clone(), held))
    }
}
