//! Muon: the momentum of a matrix is orthogonalized, as a whole, by its owner.

mod device;
mod options;
mod parts;

use std::borrow::Cow;
use std::ops::Range;

use hsdp_kernels::cuda::CudaError;
use hsdp_kernels::{NewtonSchulz, Threads};
use hsdp_sharding::{Param, ParamId, Part, WholeMatrix, Wholes};

use self::device::OnDevice;
pub use self::options::{MuonOptions, RateScale};
use self::parts::{iterations, piece_of, step_of};
use crate::error::Error;
use crate::model::ShardedModel;
use crate::optimizer::covered::Covered;
use crate::optimizer::grouped::Grouped;
use crate::optimizer::groups::Groups;
use crate::optimizer::held::{Held, Kinds, tensors_of};
use crate::optimizer::method::{Kept, Method, Traits, Updates};
use crate::optimizer::options::OptimizerOptions as _;
use crate::optimizer::run::{DeviceRun, Run};
use crate::optimizer::updating::Updating;
use crate::optimizer::whole::{Exchange, OnOwner, Staged};
use crate::persist::checkpointed::StateTensor;
use crate::persist::problem::Problem;
use crate::persist::saved::StateSource;
use crate::state::context::{Context, ErrorSite};

/// Muon (K. Jordan et al., 2024; Liu et al., arXiv 2502.16982) for matrices, with an f32 of state for each element of this rank's shards.
///
/// Each [matrix](Param::as_matrices) has an owner in its shard group ([`Owners`](hsdp_sharding::Owners)). An update brings the momentum of
/// each matrix to its owner, which orthogonalizes it, and brings the result back: one all_to_all there, and one back, over the shard
/// group. Each replica computes the same. No parameter and no state changes before all results have come.
///
/// A model on a device is updated there, with products by cuBLAS; the exchange goes through the host. The first update fails with
/// [`Error::Device`] that names the library, if there is no cuBLAS.
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
    /// The orthogonalized directions, on the host.
    staged: Staged,
    /// If the model is updated on a device.
    on_device: Option<OnDevice>,
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
        context: &Context,
        of: (&str, ParamId),
        range: Range<usize>,
    ) -> Result<Option<Cow<'a, [f32]>>, Error> {
        self.held.elements(context, of, range)
    }

    fn read(&mut self, context: &Context, saved: &dyn StateSource) -> Result<(), Problem> {
        self.held.read(context, saved)
    }
}

const KINDS: Kinds = &["muon_momentum"];

impl Method<MuonOptions> for Orthogonalization {
    fn kind(&self) -> &'static str {
        MuonOptions::KIND
    }

    fn traits(&self) -> Traits {
        Traits { counts: false, is_collective: true, on_device: true }
    }

    fn kinds(&self, _: &MuonOptions) -> Kinds {
        KINDS
    }

    fn tensors(&self, _: &MuonOptions, id: ParamId, _: &Param) -> Vec<StateTensor> {
        tensors_of(KINDS, id)
    }

    fn zeros(
        &self,
        groups: &Groups<MuonOptions>,
        site: ErrorSite<'_>,
        has: &dyn Fn(ParamId) -> bool,
    ) -> Result<Box<dyn Updates<MuonOptions>>, Error> {
        let exchange = Exchange::of(site.context, (Wholes::Matrices, 1), has)?;
        let device = site.context.update_device();
        let on_device = device.map(|device| OnDevice::new(device, groups, &exchange)).transpose();
        let on_device = on_device.map_err(|error| site.device(error))?;
        let held = Held::zeros(site, KINDS, has)?;
        Ok(Box::new(Owned { held, exchange, staged: Staged::default(), on_device }))
    }
}

impl Updates<MuonOptions> for Owned {
    fn prepare(
        &mut self,
        groups: &Groups<MuonOptions>,
        updating: &Updating<'_>,
    ) -> Result<(), Error> {
        let Self { held, exchange, on_device, .. } = self;
        match on_device {
            Some(on_device) => on_device.stage(held, exchange, groups, updating),
            None => self.stage(groups, updating),
        }
    }

    fn begin(&mut self, updating: &Updating<'_>) {
        self.staged.begin(updating);
    }

    fn update(&mut self, groups: &Groups<MuonOptions>, run: Run<'_>) {
        let Run { unit, piece, parameters, gradient, clip } = run;
        let Self { held, exchange, staged, .. } = self;
        let momentum = held.host(unit, &piece);
        let options = groups.of(unit, piece.param);
        for (part, range, place) in exchange.within(unit, &piece) {
            let step = options.of_step(exchange.matrix(part), clip);
            let parameters = &mut parameters[range.clone()];
            let sources = [&gradient[range.clone()], &staged.values()[place]];
            hsdp_kernels::muon(&step, parameters, sources, &mut momentum[range]);
        }
        staged.applied(piece.len);
    }

    fn update_on_device(
        &mut self,
        groups: &Groups<MuonOptions>,
        run: DeviceRun<'_>,
    ) -> Result<(), CudaError> {
        let Self { held, exchange, on_device, .. } = self;
        let on_device = on_device.as_ref().expect("the model is updated on a device");
        on_device.launch(held, exchange, groups, run)
    }
}

impl Owned {
    /// Orthogonalizes the directions of a step, on the host.
    fn stage(
        &mut self,
        groups: &Groups<MuonOptions>,
        updating: &Updating<'_>,
    ) -> Result<(), Error> {
        let Self { held, exchange, staged, .. } = self;
        *staged = Staged::default();
        let fill = |part: &Part, direction: &mut [f32]| {
            updating.gradient(exchange.matrix(part).param, part.shard.clone(), direction)?;
            let step = step_of(groups, exchange, (part, updating.clip()));
            let momentum = held.of_host(part.unit, &piece_of(exchange, part));
            hsdp_kernels::muon_direction(&step, direction, momentum);
            Ok(())
        };
        let of = (updating.context, updating.gradients.step);
        let workspace = |it: &WholeMatrix| NewtonSchulz::workspace(it.rows, it.columns);
        let fill = |values: &mut [f32]| exchange.each_sent(values, fill);
        let values =
            exchange.run(of, fill, workspace, |OnOwner { matrix, copies, workspace }| {
                if updating.updates(matrix.param) {
                    let (by, sizes) = (iterations(groups, matrix), (matrix.rows, matrix.columns));
                    by.orthogonalize(copies, sizes, workspace, Threads::Pool);
                }
                Ok(())
            })?;
        *staged = Staged::new(values);
        Ok(())
    }
}
