//! A loss and a model in 16 bits start a backward from the exact seed.

use std::sync::Arc;

use candle_core::{DType as CandleDType, Device, Result, Tensor};
use hsdp::{
    Accumulation, DType, LossScaling, Mesh, ModelOptions, ModelSpec, Objective, Param, Precision,
    ShardedModel, StepOptions, Unit,
};
use hsdp_candle::{Error, Pass, Units, candle_dtype};

#[derive(Clone, Debug)]
struct Case {
    loss: CandleDType,
    parameters: DType,
    scaling: LossScaling,
    mode: &'static str,
    /// Items of each microbatch of each rank.
    items: Vec<Vec<u64>>,
}

/// The gradient of the mean of `w x` over all items, where `x` is 1 on all items: 1, whatever the split.
fn gradient_of_one(case: &Case, options: ModelOptions) -> f64 {
    let ends = hsdp::world(options.mesh.world_size(), |world| {
        let items = &case.items[world.rank().index() % case.items.len()];
        let spec = ModelSpec::new().unit(Unit::new("u").param(Param::new("w", [1])));
        let precision = Precision::compute_in(case.parameters);
        let loss_scaling = case.scaling;
        let options = ModelOptions { precision, loss_scaling, ..options.clone() };
        let mut model = ShardedModel::new(world, spec, options, |_| vec![0.5])?;
        let mut step = model.begin_step(StepOptions::microbatches(items.len()))?;
        for count in items {
            let pass = Pass::new(step.microbatch()?)?;
            let x = Tensor::ones(1, candle_dtype(case.parameters)?, &Device::Cpu)?;
            let y = forward(&pass, case.mode, &x)?.to_dtype(case.loss)?.sum_all()?;
            pass.backward(&y, *count)?;
        }
        let gradients = step.finish()?;
        Ok::<_, Error>(f64::from(gradients.full(&model)?["w"][0]))
    });
    ends.into_iter().next().expect("a rank").expect("a step")
}

fn forward(units: &dyn Units, mode: &str, x: &Tensor) -> Result<Tensor> {
    match mode {
        "unit" => units.unit("u", x, &mut |p, x| x * p.get("w")?),
        _ => units.recomputed("u", x, Arc::new(|p, x| x * p.get("w")?)),
    }
}

/// bf16 would make 1000 of 1003, and 300,000 is beyond f16.
#[test]
fn no_dtype_of_the_loss_or_the_model_rounds_a_weight() {
    let splits = [
        vec![vec![1003], vec![517], vec![1], vec![777]],
        vec![vec![1001]],
        vec![vec![4099, 3], vec![5, 7]],
        vec![vec![300_001], vec![2], vec![2], vec![0]],
        vec![vec![(1 << 24) - 1], vec![3]],
        vec![vec![3, (1 << 24) - 1], vec![1, 5]],
    ];
    let scalings = [LossScaling::Off, LossScaling::Fixed(1000.0), LossScaling::Fixed(16_777_216.0)];
    let dtypes = [
        (CandleDType::F32, DType::F32),
        (CandleDType::BF16, DType::BF16),
        (CandleDType::F16, DType::F16),
        (CandleDType::F32, DType::BF16),
        (CandleDType::F64, DType::BF16),
        (CandleDType::F32, DType::F16),
        (CandleDType::BF16, DType::F32),
        (CandleDType::F16, DType::F32),
    ];
    let mesh = Mesh::new(2, 2).expect("four ranks");
    for (loss, parameters) in dtypes {
        for (scaling, items) in scalings
            .into_iter()
            .flat_map(|scaling| splits.iter().map(move |items| (scaling, items.clone())))
        {
            // A scale that f16 does not hold is an overflow where only the model is in f16.
            let is_large = scaling == LossScaling::Fixed(16_777_216.0);
            if is_large && (loss, parameters) == (CandleDType::F32, DType::F16) {
                continue;
            }
            for mode in ["unit", "recomputed"] {
                let case = Case { loss, parameters, scaling, mode, items: items.clone() };
                for (objective, accumulation) in [
                    (Objective::WeightedMean, Accumulation::ReduceScatter),
                    (Objective::WeightedMean, Accumulation::Local),
                    (Objective::RankMean, Accumulation::ReduceScatter),
                ] {
                    let options =
                        ModelOptions { objective, accumulation, ..ModelOptions::on(mesh) };
                    let got = gradient_of_one(&case, options);
                    let microbatches = match objective {
                        Objective::RankMean => items[0].len() as f64,
                        _ => 1.0,
                    };
                    assert!((got / microbatches - 1.0).abs() < 1e-6, "{case:?}: {got}");
                }
            }
        }
    }
}
