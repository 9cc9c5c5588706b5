//! A loss and a model in 16 bits start a backward from the exact seed.

use crate::common;
use candle_core::{DType as CandleDType, Device, Result, Tensor};
use hsdp::{
    Accumulation, DType, LossScaling, Mesh, ModelOptions, ModelSpec, Objective, Param, Precision,
    ShardedModel, StepOptions, Unit,
};
use hsdp_candle::{Error, Parameters, Pass, Units, UnitsExt, candle_dtype};

#[derive(Clone, Debug)]
struct Case {
    loss: CandleDType,
    parameters: DType,
    scaling: LossScaling,
    mode: &'static str,
    /// Items of each microbatch of each rank.
    items: Vec<Vec<u64>>,
}

/// The gradient of the mean of `w x` over all items, where `x` is 1 on all items: 1, whatever the
/// split.
fn gradient_of_one(case: &Case, options: ModelOptions) -> f64 {
    let ends = common::results(options.mesh.world_size(), |world| {
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
        "unit" => units.unit("u", x, |p, x| x * p.get("w")?),
        _ => units.recomputed("u", x, |p, x| x * p.get("w")?),
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

/// Weights of a chain of three units. They and the products of them are numbers of all dtypes.
const WEIGHTS: [f32; 3] = [0.5, 2.0, 0.25];

/// Items of two microbatches of four ranks. 16 bits would round all but the smallest numbers.
const ITEMS: [[u64; 2]; 4] = [[1003, 3], [517, 4099], [1, 777], [2051, 5]];

#[derive(Clone, Copy, Debug)]
enum Form {
    Mean,
    /// A sum of equal terms, so that a graph in 16 bits has exact gradients.
    Sum,
}

/// A model in `model` with one unit, an island, that computes in another dtype.
#[derive(Clone, Copy, Debug)]
struct Mixed {
    model: DType,
    island: (usize, DType),
    mode: &'static str,
    form: Form,
    scaling: LossScaling,
}

impl Mixed {
    fn spec(&self) -> ModelSpec {
        (0..WEIGHTS.len()).fold(ModelSpec::new(), |spec, index| {
            let unit = Unit::new(format!("u{index}")).param(Param::new(format!("w{index}"), [1]));
            spec.unit(if index == self.island.0 { unit.compute_in(self.island.1) } else { unit })
        })
    }

    /// The output of the chain on an input of 1, in f32.
    fn forward(&self, units: &dyn Units) -> Result<Tensor> {
        let mut x = Tensor::ones(1, CandleDType::F32, &Device::Cpu)?;
        for index in 0..WEIGHTS.len() {
            let forward = move |p: &dyn Parameters, x: &Tensor| x * p.get(&format!("w{index}"))?;
            let name = format!("u{index}");
            x = match self.mode {
                "unit" => units.unit(&name, &x, forward)?,
                _ => units.recomputed(&name, &x, forward)?,
            };
        }
        x.to_dtype(CandleDType::F32)?.sum_all()
    }

    /// Returns the gradients of the mean loss. Each item has the output of the chain as its loss.
    fn gradients(&self) -> Vec<f32> {
        let mesh = Mesh::new(2, 2).expect("four ranks");
        let ends = common::results(mesh.world_size(), |world| {
            let items = ITEMS[world.rank().index()];
            let precision = Precision::compute_in(self.model);
            let options =
                ModelOptions { precision, loss_scaling: self.scaling, ..ModelOptions::on(mesh) };
            let init = |param: &Param| match &*param.name {
                "w0" => vec![WEIGHTS[0]],
                "w1" => vec![WEIGHTS[1]],
                _ => vec![WEIGHTS[2]],
            };
            let mut model = ShardedModel::new(world, self.spec(), options, init)?;
            let mut step = model.begin_step(StepOptions::microbatches(items.len()))?;
            for count in items {
                let pass = Pass::new(step.microbatch()?)?;
                let y = self.forward(&pass)?;
                match self.form {
                    Form::Mean => pass.backward(&y, count)?,
                    Form::Sum => {
                        let terms = count.next_power_of_two();
                        pass.backward_sum(&(y * terms as f64)?, terms)?
                    }
                };
            }
            let gradients = step.finish()?.full(&model)?;
            Ok::<_, Error>((0..WEIGHTS.len()).map(|at| gradients[&format!("w{at}")][0]).collect())
        });
        ends.into_iter().next().expect("a rank").expect("a step")
    }
}

/// A gradient passes the unit in 16 bits wherever it is: in a model of f32, or beside one in f32.
#[test]
fn no_unit_in_16_bits_rounds_the_seed_of_a_model_of_several_dtypes() {
    let dtypes = [(DType::F32, DType::BF16), (DType::BF16, DType::F32)]
        .into_iter()
        .chain([(DType::F32, DType::F16), (DType::F16, DType::F32)]);
    for (model, island) in dtypes {
        for place in 0..WEIGHTS.len() {
            for (mode, form) in ["unit", "recomputed"]
                .into_iter()
                .flat_map(|mode| [Form::Mean, Form::Sum].map(|form| (mode, form)))
            {
                for scaling in [LossScaling::Off, LossScaling::Fixed(1000.0)] {
                    let case = Mixed { model, island: (place, island), mode, form, scaling };
                    // Each is the product of the other two weights.
                    for (got, want) in case.gradients().into_iter().zip([0.5, 0.125, 1.0]) {
                        let is_near = (got / want - 1.0).abs() < 1e-6;
                        assert!(is_near, "{case:?}: {got}, not {want}");
                    }
                }
            }
        }
    }
}

/// An f32 model whose forward casts, in a unit and behind it.
#[test]
fn no_cast_of_a_forward_in_f32_rounds_the_seed() {
    let forward = |units: &dyn Units, mode: &str, dtype: CandleDType| {
        let cast = move |p: &dyn Parameters, x: &Tensor| {
            (x.to_dtype(dtype)? * p.get("w")?.to_dtype(dtype)?)?.to_dtype(CandleDType::F32)
        };
        let x = Tensor::ones(1, CandleDType::F32, &Device::Cpu)?;
        match mode {
            "unit" => units.unit("u", &x, cast),
            "recomputed" => units.recomputed("u", &x, cast),
            _ => units.output(&units.unit("u", &x, |p, x| x * p.get("w")?)?),
        }
    };
    let mesh = Mesh::new(2, 2).expect("four ranks");
    for (narrow, mode) in [DType::BF16, DType::F16]
        .into_iter()
        .flat_map(|narrow| ["unit", "recomputed", "output"].map(|mode| (narrow, mode)))
    {
        let ends = common::results(mesh.world_size(), |world| {
            let items = ITEMS[world.rank().index()];
            let spec = ModelSpec::new().unit(Unit::new("u").param(Param::new("w", [1])));
            let precision = Precision { output: Some(narrow), ..Precision::default() };
            let options = ModelOptions { precision, ..ModelOptions::on(mesh) };
            let mut model = ShardedModel::new(world, spec, options, |_| vec![0.5])?;
            let mut step = model.begin_step(StepOptions::microbatches(items.len()))?;
            for count in items {
                let pass = Pass::new(step.microbatch()?)?;
                let y = forward(&pass, mode, candle_dtype(narrow)?)?;
                pass.backward(&y.to_dtype(CandleDType::F32)?.sum_all()?, count)?;
            }
            Ok::<_, Error>(step.finish()?.full(&model)?["w"][0])
        });
        for got in ends {
            let got = got.expect("a step");
            assert!((got - 1.0).abs() < 1e-6, "{mode} in {narrow}: {got}");
        }
    }
}
