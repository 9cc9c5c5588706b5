//! Statistics of a batch in steps of a model that lies on a device.

use hsdp::{
    Error, LossSum, ModelSpec, Param, Phase, ShardedModel, StepOptions, Unit, UnitGradients, UnitId,
};
use hsdp_tests::support::worlds::on_ranks;

use super::{PLACES, placed};

const NORM: UnitId = UnitId::new(0);
const HEAD: UnitId = UnitId::new(1);

/// The sums that each rank sees are those of the host, in the order in which the gathers and
/// reductions on the device leave them.
#[test]
#[ignore = "needs a CUDA device"]
fn sums_are_those_of_the_host() {
    let spec = ModelSpec::new()
        .unit(Unit::new("norm").param(Param::new("conv", [9, 5])).batch_norm("bn", 5))
        .unit(Unit::new("head").param(Param::new("weight", [7])));
    for sizes in [[1, 2], [2, 2], [4, 1]] {
        let [on_host, on_device] = PLACES.map(|placement| {
            on_ranks(sizes[0] * sizes[1], |world| -> Result<_, Error> {
                let rank = world.rank().index();
                let initial = |param: &Param| vec![1.0; param.numel()];
                let mut model =
                    ShardedModel::new(world, spec.clone(), placed(placement, sizes), initial)?;
                let mut seen = Vec::new();
                for _ in 0..2 {
                    let mut step = model.begin_step(StepOptions::microbatches(2))?;
                    for microbatch in 0..2 {
                        let own = |elements| vec![0.1 * (rank + microbatch) as f64; elements];
                        let mut pass = step.microbatch()?;
                        let handle = pass.handle();
                        drop(pass.unshard(NORM)?);
                        seen.push(handle.statistics(NORM, 0, Phase::Forward, own(11))?);
                        drop(pass.unshard(HEAD)?);
                        let _ = pass.loss(LossSum::new(1.0, 1))?;
                        drop(pass.unshard(HEAD)?);
                        pass.reduce(HEAD, UnitGradients::of([vec![1.0_f32; 7]]))?;
                        drop(pass.unshard(NORM)?);
                        seen.push(handle.statistics(NORM, 0, Phase::Backward, own(10))?);
                        let gradients = [45, 5, 5].map(|len| vec![0.5_f32; len]);
                        pass.reduce(NORM, UnitGradients::of(gradients))?;
                        pass.finish()?;
                    }
                    seen.push(vec![step.finish()?.norm()]);
                }
                Ok(seen)
            })
        });
        assert_eq!(on_device, on_host, "{sizes:?}");
    }
}
