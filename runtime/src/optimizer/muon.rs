//! Muon: the momentum of a matrix is orthogonalized, as a whole, by its owner.

mod options;

use std::borrow::Cow;
use std::ops::Range;

use hsdp_kernels::{NewtonSchulz, Threads};
use hsdp_sharding::{Param, ParamId, Part, Piece, WholeMatrix, Wholes};

pub use self::options::{MuonOptions, RateScale};

use crate::checkpoint::{Problem, SavedState, StateTensor};
use crate::engine::fabric::Fabric;
use crate::error::Error;
use crate::model::ShardedModel;
use crate::optimizer::covered::Covered;
use crate::optimizer::groups::Groups;
use crate::optimizer::held::{Held, Kinds, tensors_of};
use crate::optimizer::method::{Kept, Method, Traits, Updates};
use crate::optimizer::options::OptimizerOptions as _;
use crate::optimizer::state::Of;
use crate::optimizer::whole::{Exchange, OnOwner};
use crate::optimizer::{Grouped, Run, Updating};

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
pub type Muon = Grouped<MuonOptions>;

impl Muon {
    /// An optimizer for matrices of `model`.
    #[must_use]
    pub fn new(model: &ShardedModel, options: MuonOptions) -> Self {
        Self::of(model, &Orthogonalization, options)
    }
}

/// The method of Muon.
#[derive(Debug)]
struct Orthogonalization;

/// The momentum of matrices, and the exchange with their owners.
#[derive(Debug)]
struct Owned {
    held: Held,
    exchange: Exchange,
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

/// The options of the parameter of a part.
fn options_of<'a>(
    groups: &'a Groups<MuonOptions>,
    exchange: &Exchange,
    part: &Part,
) -> &'a MuonOptions {
    let ParamId { unit, index } = exchange.matrix(part).param;
    groups.of(unit, index)
}

impl Kept for Owned {
    fn covered(&self) -> &Covered {
        &self.held.covered
    }

    fn covered_mut(&mut self) -> &mut Covered {
        &mut self.held.covered
    }

    fn elements<'a>(
        &'a self,
        fabric: &Fabric,
        of: (&str, ParamId),
        range: Range<usize>,
    ) -> Result<Option<Cow<'a, [f32]>>, Error> {
        self.held.elements(fabric, of, range)
    }

    fn read(&mut self, fabric: &Fabric, saved: &SavedState<'_>) -> Result<(), Problem> {
        self.held.read(fabric, saved)
    }
}

const KINDS: Kinds = &["muon_momentum"];

impl Method<MuonOptions> for Orthogonalization {
    fn kind(&self) -> &'static str {
        MuonOptions::KIND
    }

    fn traits(&self) -> Traits {
        Traits { counts: false, is_collective: true, on_device: false }
    }

    fn kinds(&self, _: &MuonOptions) -> Kinds {
        KINDS
    }

    fn tensors(&self, _: &MuonOptions, id: ParamId, _: &Param) -> Vec<StateTensor> {
        tensors_of(KINDS, id)
    }

    fn zeros(
        &self,
        _: &Groups<MuonOptions>,
        (fabric, of): (&Fabric, Of),
        has: &dyn Fn(ParamId) -> bool,
    ) -> Result<Box<dyn Updates<MuonOptions>>, Error> {
        let exchange = Exchange::of(fabric, (Wholes::Matrices, 1), has)?;
        let held = Held::zeros(fabric, (KINDS, of), has)?;
        Ok(Box::new(Owned { held, exchange, staged: Staged::default() }))
    }
}

impl Updates<MuonOptions> for Owned {
    fn prepare(
        &mut self,
        groups: &Groups<MuonOptions>,
        updating: &Updating<'_>,
    ) -> Result<(), Error> {
        let Self { held, exchange, staged } = self;
        let fill = |part: &Part, direction: &mut [f32]| {
            updating.gradient(part.unit, part.shard.clone(), direction)?;
            let step = options_of(groups, exchange, part);
            let step = step.of_step(exchange.matrix(part), updating.clip());
            let momentum = held.of_host(part.unit, &piece_of(exchange, part));
            hsdp_kernels::muon_direction(&step, direction, momentum);
            Ok(())
        };
        let of = (updating.fabric, updating.gradients.step);
        let workspace = |it: &WholeMatrix| NewtonSchulz::workspace(it.rows, it.columns);
        let values =
            exchange.run(of, fill, workspace, |OnOwner { matrix, copies, workspace }| {
                let WholeMatrix { param, rows, columns, .. } = *matrix;
                let by = groups.of(param.unit, param.index).newton_schulz;
                by.orthogonalize(copies, (rows, columns), workspace, Threads::Pool);
            })?;
        *staged = Staged { values, left: 0 };
        Ok(())
    }

    fn begin(&mut self, updating: &Updating<'_>) {
        self.staged.left = updating.pieces().map(|(_, piece)| piece.len).sum();
    }

    fn update(&mut self, groups: &Groups<MuonOptions>, run: Run<'_>) {
        let Run { unit, piece, parameters, gradient, clip } = run;
        let Self { held, exchange, staged } = self;
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
}
