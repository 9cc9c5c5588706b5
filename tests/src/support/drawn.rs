//! Models, options and programs that are drawn, each case from one number.

use crate::support::programs::{Call, Part, Program, StepProgram, plain_microbatch};
use crate::support::worlds::mesh;
use hsdp::{
    Accumulation, FullCopies, LossScaling, ModelOptions, ModelSpec, Objective, Param, Samples,
    StateOver, Uneven, Unit, UnitId, UnitOrder, Unused,
};
use hsdp_sharding::AfterForward;
use hsdp_sharding::step::{EvaluationKind, Input};
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A model, its options, and the programs of all ranks.
#[derive(Clone, Debug)]
pub struct Drawn {
    /// The model.
    pub spec: ModelSpec,
    /// Its options.
    pub options: ModelOptions,
    /// Programs by rank.
    pub programs: Vec<Program>,
}

impl Drawn {
    /// Draws a case on a mesh of up to 2 x 3 ranks. `fit` changes the options, before programs for
    /// them are drawn.
    pub fn of(seed: u64, fit: impl FnOnce(&mut ModelOptions)) -> Self {
        let mut draw = Draw(ChaCha8Rng::seed_from_u64(seed));
        let spec = draw.spec();
        let mut options = draw.options();
        fit(&mut options);
        let programs = draw.programs(&spec, &options);
        Self { spec, options, programs }
    }
}

struct Draw(ChaCha8Rng);

impl Draw {
    fn below(&mut self, end: usize) -> usize {
        self.0.random_range(0..end)
    }

    /// Returns true once in `n` draws.
    fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        *all.choose(&mut self.0).expect("some")
    }

    fn shuffled<T: Copy>(&mut self, all: &[T]) -> Vec<T> {
        let mut all = all.to_vec();
        all.shuffle(&mut self.0);
        all
    }

    /// Draws units of different sizes. The first one is trained.
    fn spec(&mut self) -> ModelSpec {
        (0..=self.below(4)).fold(ModelSpec::new(), |spec, at| {
            let weight = Param::new(format!("{at}.weight"), [2 * at + 3, 5]);
            let bias = Param::new(format!("{at}.bias"), [at + 2]);
            let unit = Unit::new(format!("{at}"));
            let kind = if at == 0 { 3 } else { self.below(6) };
            let unit = match kind {
                0 => unit.param(weight.frozen()),
                1 => unit.param(weight.frozen()).forward_only(),
                2 => unit.param(weight.frozen()).param(bias),
                _ => unit.param(weight).param(bias),
            };
            spec.unit(if kind != 1 && self.once_in(3) { unit.keep() } else { unit })
        })
    }

    fn options(&mut self) -> ModelOptions {
        let on = mesh(1 + self.below(2), 1 + self.below(3));
        let dynamic = LossScaling::Dynamic(hsdp::DynamicScale::default());
        let uneven = self.one_of(&[Uneven::Error, Uneven::Stop, Uneven::ZeroWeight]);
        // Ranks without data need weights.
        let objective = match uneven {
            Uneven::Error | Uneven::Stop => self.one_of(&[Objective::Sum, Objective::RankMean]),
            Uneven::ZeroWeight => Objective::Sum,
        };
        let full_copies = self.one_of(&FullCopies::ALL);
        let state = match full_copies {
            FullCopies::PerRank => self.one_of(&StateOver::ALL),
            FullCopies::PerProcess => StateOver::Shards,
        };
        ModelOptions {
            accumulation: self.one_of(&Accumulation::ALL),
            prefetch: self.one_of(&[0, 1, 2, usize::MAX]),
            full_copies,
            state,
            order: self.one_of(&[UnitOrder::Follow, UnitOrder::Follow, UnitOrder::Error]),
            uneven,
            objective,
            unused: self.one_of(&[Unused::Zeros, Unused::Warn]),
            loss_scaling: self.one_of(&[LossScaling::Off, LossScaling::Off, dynamic]),
            compare_replicas: self.one_of(&[None, None, Some(1.try_into().expect("above 0"))]),
            ..ModelOptions::on(on)
        }
    }

    /// Draws two steps, and sometimes an evaluation before the second one.
    fn programs(&mut self, spec: &ModelSpec, options: &ModelOptions) -> Vec<Program> {
        let declared: Vec<UnitId> = spec.unit_ids().collect();
        let order = match options.order {
            UnitOrder::Follow => self.shuffled(&declared),
            UnitOrder::Error => declared,
        };
        let mut programs = vec![Program::new(); options.mesh.world_size()];
        for number in 0..2 {
            if self.once_in(3) {
                let kinds = [EvaluationKind::ForwardOnly, EvaluationKind::WithBackward];
                let kind = self.one_of(&kinds);
                for program in &mut programs {
                    let batches = self.below(3);
                    let batch = |draw: &mut Self| draw.batch(kind, spec, options, &order);
                    let batches = (0..batches).map(|_| batch(self)).collect();
                    program.push(Part::Evaluation(kind, batches));
                }
            }
            let given = [None, Some(1 + self.below(3))][self.below(2)];
            let count = given.unwrap_or(1 + self.below(2));
            let names = self.once_in(4);
            for (rank, program) in programs.iter_mut().enumerate() {
                let own = match options.uneven {
                    Uneven::ZeroWeight if rank > 0 => self.below(count + 1),
                    Uneven::Stop if given.is_none() => 1 + self.below(count),
                    _ => count,
                };
                let has_data = own > 0 || number == 0 || self.once_in(2);
                let input = if has_data { Input::Ready } else { Input::Exhausted };
                let samples = (names && self.once_in(2)).then(|| Samples::of([rank as u64]));
                let microbatches = (0..own).map(|_| self.microbatch(spec, options, &order));
                let microbatches = microbatches.collect();
                program.push(Part::Step(StepProgram { given, input, samples, microbatches }));
            }
        }
        programs
    }

    /// Draws the units that a forward uses, most often all in the order of the others.
    fn used(&mut self, options: &ModelOptions, order: &[UnitId]) -> Vec<UnitId> {
        let may_differ = options.order == UnitOrder::Follow;
        let differs = may_differ && self.once_in(8);
        let units = if differs { self.shuffled(order) } else { order.to_vec() };
        let skips = self.once_in(4);
        units.into_iter().filter(|_| !(skips && self.once_in(3))).collect()
    }

    /// Draws the units that a batch of an evaluation needs, most often all that it has used again,
    /// where it takes part in a backward.
    fn batch(
        &mut self,
        kind: EvaluationKind,
        spec: &ModelSpec,
        options: &ModelOptions,
        order: &[UnitId],
    ) -> Vec<UnitId> {
        let used = self.used(options, order);
        let mut again: Vec<UnitId> = used.iter().rev().copied().collect();
        again.retain(|unit| spec[*unit].after_forward == AfterForward::Reshard);
        match kind {
            EvaluationKind::WithBackward if !self.once_in(6) => {
                again.retain(|_| !self.once_in(6));
            }
            _ => again.clear(),
        }
        [used, again].concat()
    }

    fn microbatch(
        &mut self,
        spec: &ModelSpec,
        options: &ModelOptions,
        order: &[UnitId],
    ) -> Vec<Call> {
        if self.once_in(3) {
            return plain_microbatch(spec, order);
        }
        let used = self.used(options, order);
        let mut calls: Vec<Call> = used.iter().copied().map(Call::Need).collect();
        if self.once_in(8) {
            // This rank has no loss, and so no backward.
            return calls;
        }
        calls.push(Call::Loss);
        let mut backward = Vec::new();
        for unit in order.iter().rev() {
            // A kept unit that the forward has not used is there for the backward.
            let is_left = match spec[*unit].after_forward {
                AfterForward::Reshard => true,
                AfterForward::Keep => options.order == UnitOrder::Follow && !used.contains(unit),
                AfterForward::Discard => false,
            };
            backward.extend((is_left && !self.once_in(6)).then_some(Call::Need(*unit)));
            let is_offered = spec[*unit].is_trainable() && !self.once_in(5);
            backward.extend(is_offered.then_some(Call::Offer(*unit)));
        }
        if self.once_in(2) {
            backward = self.shuffled(&backward);
        }
        calls.extend(backward);
        calls
    }
}
