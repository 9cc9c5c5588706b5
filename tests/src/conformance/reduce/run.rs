//! Running a case: one step on every rank, then the comparison.

use std::collections::BTreeMap;
use std::sync::Arc;

use half::{bf16, f16};
use hsdp::{
    DType, GradientValues, LossSum, ModelOptions, ModelSpec, Objective, Param, Placement,
    Precision, Rank, ShardedModel, StepOptions, Unit, UnitId, Unused, World,
};
use hsdp_kernels::cuda::{Device, DeviceBuffer};
use serde::{Deserialize, Serialize};

use super::{CaseParam, ReduceCase};
use crate::conformance::compare::{Tally, first_difference};
use crate::conformance::ranks::{Site, on_ranks};
use crate::conformance::{Verdict, ledger};

/// Gradients of a unit, one entry for each parameter.
type Entries = Vec<Option<Arc<dyn GradientValues>>>;

impl ReduceCase {
    /// Runs it, with a thread for each rank.
    #[must_use]
    pub fn run(&self) -> Verdict {
        self.run_on(Site::default())
    }

    /// Runs it, with a thread for each rank, there.
    #[must_use]
    pub fn run_on(&self, site: Site) -> Verdict {
        self.try_run(site).unwrap_or_else(Verdict::Failed)
    }

    fn try_run(&self, site: Site) -> Result<Verdict, String> {
        let reduced =
            on_ranks(self.mesh, site.carrier, |world| self.run_rank(world, site.placement))?;
        self.check_agreement(&reduced)?;
        for (rank, reduced) in self.mesh.ranks().zip(&reduced) {
            reduced.ledger.as_ref().map_err(|what| format!("rank {rank}: {what}"))?;
        }
        let full = &reduced[0].full;
        let mut tally = Tally::default();
        for (name, param) in self.parameters().filter(|(_, param)| param.trainable) {
            let got = full.get(&name).ok_or_else(|| format!("{name} has no gradient"))?;
            self.compare(&mut tally, &name, param, got);
        }
        Ok(if self.exact { tally.exact_verdict() } else { tally.verdict() })
    }

    fn compare(&self, tally: &mut Tally, name: &str, param: &CaseParam, got: &[f32]) {
        let expected = &self.expected[name];
        let bounds = self.bounds(name, param, expected.len());
        for (index, ((&got, &expected), bound)) in got.iter().zip(expected).zip(bounds).enumerate()
        {
            let place = || format!("{name}[{index}]");
            if self.exact {
                tally.exactly(got, expected, place);
            } else {
                tally.within(got.into(), expected.into(), bound, place);
            }
        }
    }

    /// Checks that all ranks are equal bit for bit: replicas in their shards with the padding, all
    /// ranks in the whole gradient.
    fn check_agreement(&self, reduced: &[Reduced]) -> Result<(), String> {
        for (rank, of_rank) in self.mesh.ranks().zip(reduced) {
            let twin = self.mesh.coordinate(rank).shard_index;
            for (unit, (shard, other)) in
                of_rank.shards.iter().zip(&reduced[twin].shards).enumerate()
            {
                if let Some(at) = first_difference(shard, other) {
                    return Err(format!(
                        "ranks {rank} and {twin}: shards of unit {unit} differ at element {at}"
                    ));
                }
            }
            for (name, values) in &of_rank.full {
                if let Some(at) = first_difference(values, &reduced[0].full[name]) {
                    return Err(format!("{name}[{at}]: ranks {rank} and 0 differ"));
                }
            }
        }
        Ok(())
    }

    /// One rank's step.
    fn run_rank(&self, world: World, placement: Placement) -> Result<Reduced, hsdp::Error> {
        let rank = world.rank();
        let zeros = |param: &Param| vec![0.0; param.numel()];
        let mut model =
            ShardedModel::new(world.clone(), self.spec(), self.options(placement), zeros)?;
        let before = world.ledger();
        let mut step = model.begin_step(StepOptions::microbatches(self.microbatches))?;
        for microbatch in 0..self.microbatches {
            let mut pass = step.microbatch()?;
            // A sum over one item: what the gradients are of does not matter, they come from a file
            // as they are.
            let seed = pass.loss(LossSum::new(0.0, 1))?;
            assert_eq!(seed.value(), 1.0, "the gradients of the case started from 1");
            for unit in (0..self.units.len()).rev() {
                let gradients = self.unit_gradients(microbatch, rank, unit);
                let gradients = placed(gradients, placement);
                if gradients.iter().any(Option::is_some) {
                    pass.reduce(UnitId::new(unit), gradients.into_iter().collect())?;
                }
            }
            pass.finish()?;
        }
        let gradients = step.finish()?;
        let ledger = ledger::check(self, model.plan(), rank, &world.ledger().since(&before));
        let units = model.plan().spec().unit_ids();
        let shards = units.map(|unit| gradients.shard(&model, unit)).collect::<Result<_, _>>()?;
        Ok(Reduced { full: gradients.full(&model)?, shards, ledger })
    }

    pub(super) fn spec(&self) -> ModelSpec {
        let declare = |unit: usize, params: &Vec<CaseParam>| {
            params.iter().fold(Unit::new(unit.to_string()), |declared, param| {
                let parameter = Param::new(format!("{unit}.{}", param.name), param.shape.clone());
                declared.param(if param.trainable { parameter } else { parameter.frozen() })
            })
        };
        let units = self.units.iter().enumerate();
        units.fold(ModelSpec::new(), |spec, (unit, params)| spec.unit(declare(unit, params)))
    }

    pub(super) fn options(&self, placement: Placement) -> ModelOptions {
        ModelOptions {
            placement,
            precision: Precision {
                parameters: self.param_dtype,
                wire: self.reduce_dtype,
                output: None,
            },
            accumulation: self.accumulation,
            objective: self.divide_factor.map_or(Objective::RankMean, Objective::Factor),
            unused: Unused::Zeros,
            ..ModelOptions::on(self.mesh)
        }
    }

    fn unit_gradients(&self, microbatch: usize, rank: Rank, unit: usize) -> Entries {
        let gradient = |param: &CaseParam| {
            let name = Self::gradient_name(microbatch, rank, &format!("{unit}.{}", param.name));
            param
                .has_gradient(microbatch)
                .then(|| in_dtype(self.param_dtype, &self.gradients[&name]))
        };
        self.units[unit].iter().map(gradient).collect()
    }
}

/// The gradients of a model on a device: every second one lies there, too.
fn placed(gradients: Entries, placement: Placement) -> Entries {
    if let Placement::Cuda { ordinal, .. } = placement {
        let there = |(index, gradient): (usize, Option<Arc<dyn GradientValues>>)| match gradient {
            Some(gradient) if index % 2 == 0 => Some(uploaded(&*gradient, ordinal)),
            gradient => gradient,
        };
        return gradients.into_iter().enumerate().map(there).collect();
    }
    gradients
}

fn uploaded(gradient: &dyn GradientValues, ordinal: usize) -> Arc<dyn GradientValues> {
    let device = Device::new(ordinal).expect("the model lies on it");
    let stream = device.stream().expect("a stream");
    let mut there = None;
    gradient.read(0..gradient.len(), &mut |values| {
        let mut buffer = DeviceBuffer::new(&device, values.dtype(), values.len(), "a gradient")
            .expect("device memory");
        buffer.write(&stream, values).expect("written");
        there = Some(buffer);
    });
    Arc::new(there.expect("lent once"))
}

/// The results of one rank after the step.
#[derive(Serialize, Deserialize)]
struct Reduced {
    full: BTreeMap<String, Vec<f32>>,
    shards: Vec<Vec<f32>>,
    ledger: Result<(), String>,
}

/// Values as a backward pass in `dtype` hands them in.
fn in_dtype(dtype: DType, values: &[f32]) -> Arc<dyn GradientValues> {
    match dtype {
        DType::F16 => Arc::new(values.iter().copied().map(f16::from_f32).collect::<Vec<_>>()),
        DType::BF16 => Arc::new(values.iter().copied().map(bf16::from_f32).collect::<Vec<_>>()),
        _ => Arc::new(values.to_vec()),
    }
}
