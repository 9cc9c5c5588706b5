//! Muon: the momentum of a matrix is orthogonalized, as a whole, by its owner.

mod device;
mod options;

use hsdp_kernels::cuda::CudaError;
use hsdp_kernels::memory::Category;
use hsdp_kernels::{MatrixDType, NewtonSchulz, Threads};
use hsdp_sharding::{Part, WholeMatrix, Wholes};

use self::options::{EXCHANGES, bundles};
pub use self::options::{MuonOptions, RateScale};
use crate::error::Error;
use crate::optimizer::exchange::Staged;
use crate::optimizer::grouped::Grouped;
use crate::optimizer::interface::{ClippedGradient, DeviceRun, Run};
use crate::optimizer::rule::{MOMENTUM_KINDS, Rule, RuleExchange, RunState, Setting, choice};
use crate::optimizer::state::OptimizerState;
use crate::options::allowed::Allowed;

/// Muon (K. Jordan et al., 2024; Liu et al., arXiv 2502.16982) for matrices, with an f32 of state
/// for each element that this rank updates.
///
/// Each [matrix](hsdp_sharding::Param::as_matrices) has an owner in its shard group
/// ([`Owners`](hsdp_sharding::Owners)), and each replica computes the same; with
/// [`StateOver::World`](crate::StateOver::World) it has one owner among all ranks. An update sends
/// the momentum of each matrix to its owner, which orthogonalizes it, and returns the result: one
/// all_to_all there, and one back. No parameter and no state changes before all results have
/// arrived. An owner orthogonalizes matrices of one shape together, as far as their iterations are
/// the same, up to 2^22 elements ([`WholeMatrix::at_once`](hsdp_sharding::WholeMatrix::at_once)).
/// On the host the bits are those of each matrix alone.
///
/// A model on a device is updated there, with products by cuBLAS; the exchange goes through the
/// host. The first update fails with [`Error::Device`] that names the library, if there is no
/// cuBLAS.
///
/// It is for the matrices inside of a model. Embeddings, the last layer, and parameters that are no
/// matrices have another optimizer:
///
/// ```
/// use hsdp::prelude::*;
/// # fn step(model: &mut ShardedModel, gradients: hsdp::Gradients) -> Result<(), hsdp::Error> {
/// let is_matrix = |param: &Param| param.name.contains("layers") && param.as_matrices().is_some();
/// let mut muon = hsdp::Muon::new(model, hsdp::MuonOptions::default());
/// let mut adamw = AdamW::new(model, AdamWOptions::default());
/// model.update_by(gradients, [(&mut muon, &is_matrix), (&mut adamw, &|it| !is_matrix(it))])?;
/// # Ok(())
/// # }
/// ```
pub type Muon = Grouped<MuonOptions>;

impl Rule for MuonOptions {
    const KIND: &'static str = "muon";
    const ON_DEVICE: bool = true;
    const COLLECTIVE: bool = true;
    const WHOLES: Option<Wholes> = Some(Wholes::Matrices);

    fn options(&mut self, see: &mut dyn FnMut(&'static str, Setting<'_>)) {
        let NewtonSchulz { steps, coefficients: [a, b, c], eps, dtype } = &mut self.newton_schulz;
        see("learning_rate", Setting::Rate(&mut self.learning_rate));
        see("momentum", Setting::Number(&mut self.momentum, Allowed::Fraction));
        choice(see, "momentum_kind", &mut self.momentum_kind, &MOMENTUM_KINDS);
        see("weight_decay", Setting::Number(&mut self.weight_decay, Allowed::NotNegative));
        see("newton_schulz.steps", Setting::Count(steps));
        see("newton_schulz.coefficients.0", Setting::Number(a, Allowed::Finite));
        see("newton_schulz.coefficients.1", Setting::Number(b, Allowed::Finite));
        see("newton_schulz.coefficients.2", Setting::Number(c, Allowed::Finite));
        see("newton_schulz.eps", Setting::Number(eps, Allowed::Positive));
        choice(see, "newton_schulz.dtype", dtype, &[MatrixDType::F32, MatrixDType::BF16]);
        let scales = [RateScale::Original, RateScale::MatchRmsAdamW];
        choice(see, "rate_scale", &mut self.rate_scale, &scales);
    }
    fn kinds(&self) -> &'static [&'static str] {
        &["muon_momentum"]
    }

    /// Orthogonalizes the directions of a step.
    fn exchange(now: RuleExchange<'_, Self>) -> Result<(), Error> {
        if now.updating.is_on_device() {
            return device::exchange(now);
        }
        let RuleExchange { options, state, updating } = now;
        let OptimizerState { kinds, exchange, staged, .. } = state;
        let exchange = exchange.as_ref().expect(EXCHANGES);
        staged.matrices = Staged::default();
        let fill = |part: &Part, direction: &mut [f32]| {
            let matrix = exchange.matrix(part);
            updating.gradient(matrix.param, part.shard.clone(), direction)?;
            let step = options(matrix.param).of_step(matrix, updating.clip());
            let momentum = kinds[0].of_run(part.unit, &exchange.piece_of(part));
            hsdp_kernels::muon_direction(&step, direction, momentum);
            Ok(())
        };
        let fill = |values: &mut [f32]| exchange.each_sent(values, fill);
        let bundles = bundles(exchange, options, updating);
        let values = exchange.run(updating.site(), &bundles, fill, |bundle, matrices| {
            let &WholeMatrix { param, rows, columns, .. } = bundle.first;
            let by = options(param).newton_schulz;
            let count = bundle.count();
            let len = count * NewtonSchulz::workspace(rows, columns);
            let mut workspace = updating.site().zeros(Category::Update, param.unit, len)?;
            by.orthogonalize(matrices, count, rows, columns, &mut workspace, Threads::Pool);
            Ok(())
        })?;
        staged.matrices = Staged::new(values);
        Ok(())
    }

    fn update(&self, _: u64, run: Run<'_>, RunState { state, .. }: RunState<'_>) {
        let Run { unit, piece, parameters, gradient } = run;
        let ClippedGradient { values: gradient, clip } = gradient;
        let OptimizerState { kinds, exchange, staged, .. } = state;
        let exchange = exchange.as_ref().expect(EXCHANGES);
        let momentum = kinds[0].of_run_mut(unit, &piece);
        for (part, range, place) in exchange.within(unit, &piece) {
            let step = self.of_step(exchange.matrix(part), clip);
            let parameters = &mut parameters[range.clone()];
            let sources = [&gradient[range.clone()], &staged.matrices.values()[place]];
            hsdp_kernels::muon(&step, parameters, sources, &mut momentum[range]);
        }
    }

    fn update_on_device(&self, run: DeviceRun<'_>, state: RunState<'_>) -> Result<(), CudaError> {
        device::update(self, run, state.state)
    }
}
