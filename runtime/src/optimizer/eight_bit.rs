//! AdamW with state of 8 bits an element.

use std::borrow::Cow;
use std::fmt::{self, Display, Write as _};
use std::ops::Range;

use hsdp_checkpoint::OptimizerHead;
use hsdp_kernels::cuda::CudaError;
use hsdp_kernels::memory::{self, Category};
use hsdp_kernels::{EIGHT_BIT_BLOCK, EightBit};
use hsdp_sharding::{Granularity, ModelSpec, Param, ParamId, UnitId};
use serde_json::Value;

use crate::checkpoint::{Checkpointed, Expected, Problem, SavedState, Spread, StateTensor};
use crate::engine::fabric::Fabric;
use crate::error::Error;
use crate::model::{ModelId, ShardedModel};
use crate::optimizer::covered::Covered;
use crate::optimizer::groups::Groups;
use crate::optimizer::pass::trained_pieces;
use crate::optimizer::places::{Packing, Places};
use crate::optimizer::rule::OptimizerOptions;
use crate::optimizer::{AdamWOptions, DeviceRun, Optimizer, Run, Updating};

/// AdamW whose moments take 8 bits an element, in blocks of 256 elements with a scale each (Dettmers et al., arXiv 2110.02861).
///
/// A rank keeps two bytes for each element and two f32 for each block. Parameters declare their blocks before the plan is made
/// ([`Param::blocks`]`(256)`), so that shards are cut between blocks, and the bits of an update are the same on any mesh.
///
/// A checkpoint has the codes, from 0 to 255, as f32, and the scales.
#[derive(Debug)]
pub struct AdamW8Bit {
    model: ModelId,
    groups: Groups<EightBitOptions>,
    held: Option<Held>,
}

/// The options of AdamW, for state of 8 bits.
#[derive(Clone, Copy, Debug)]
struct EightBitOptions(AdamWOptions);

#[derive(Debug)]
struct Held {
    covered: Covered,
    /// The places of scales. Those of codes are the ones of `covered`.
    scales: Places,
    moments: [Moment; 2],
}

/// The codes and the scales of a moment, by unit.
#[derive(Debug)]
struct Moment {
    codes: Vec<Vec<u8>>,
    scales: Vec<Vec<f32>>,
}

/// The tensors of a checkpoint: codes and scales of the first moment, and then of the second.
const TENSORS: [(&str, Spread); 4] = [
    ("exp_avg_code", Spread::Elements),
    ("exp_avg_scale", Spread::Blocks(EIGHT_BIT_BLOCK)),
    ("exp_avg_sq_code", Spread::Elements),
    ("exp_avg_sq_scale", Spread::Blocks(EIGHT_BIT_BLOCK)),
];

impl AdamW8Bit {
    /// An optimizer for this rank's shards of `model`.
    #[must_use]
    pub fn new(model: &ShardedModel, options: AdamWOptions) -> Self {
        let groups = Groups::none(model, EightBitOptions(options));
        Self { model: model.id().clone(), groups, held: None }
    }

    /// Gives a group of parameters options of its own, as [`Elementwise::group`](crate::Elementwise::group) does.
    #[must_use]
    pub fn group(
        self,
        has: impl Fn(&Param) -> bool,
        change: impl FnOnce(AdamWOptions) -> AdamWOptions,
    ) -> Self {
        let change = |EightBitOptions(options)| EightBitOptions(change(options));
        Self { groups: self.groups.with(has, change), ..self }
    }

    /// Sets the learning rate of a group, as [`Elementwise::set_learning_rate_of`](crate::Elementwise::set_learning_rate_of) does.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn set_learning_rate_of(&mut self, group: usize, rate: f64) {
        self.groups.set_learning_rate_of(group, rate);
    }
}

/// Checks that the parameters are cut between blocks, whatever the mesh.
fn check_blocks(updating: &Updating<'_>) -> Result<(), Error> {
    let is_cut_within = |param: &Param| match param.granularity {
        Granularity::Blocks(block) => !block.is_multiple_of(EIGHT_BIT_BLOCK),
        Granularity::Element | Granularity::Rows(_) => true,
    };
    let mut params = updating.plan().spec().params();
    match params.find(|(id, param)| updating.has(*id) && is_cut_within(param)) {
        None => Ok(()),
        Some((_, param)) => {
            let name = &param.name;
            let what = format!(
                "parameter `{name}`: adamw8bit keeps state in blocks of {EIGHT_BIT_BLOCK} elements, and shards are cut within them: declare \
                 the parameter with `blocks({EIGHT_BIT_BLOCK})`"
            );
            Err(Error::Options { what })
        }
    }
}

impl Held {
    fn zeros(
        fabric: &Fabric,
        (operation, step): (&'static str, u64),
        has: impl Fn(ParamId) -> bool,
    ) -> Result<Self, Error> {
        let blocks = Packing { block: EIGHT_BIT_BLOCK, quantum: 1 };
        let scales = Places::of(fabric, blocks, &has);
        let covered = Covered::of(fabric, has);
        let moment = || {
            let failed =
                |unit| move |error| fabric.no_memory(error, operation, (step, UnitId::new(unit)));
            let codes = covered.places.lens().enumerate();
            let codes = codes.map(|(unit, len)| zeros(len).map_err(failed(unit)));
            let codes = codes.collect::<Result<_, _>>()?;
            let scales = scales.lens().enumerate();
            let scales = scales.map(|(unit, len)| zeros(len).map_err(failed(unit)));
            Ok::<_, Error>(Moment { codes, scales: scales.collect::<Result<_, _>>()? })
        };
        let moments = [moment()?, moment()?];
        Ok(Self { covered, scales, moments })
    }

    /// The state of elements of a parameter.
    fn state(&mut self, parameter: ParamId, range: Range<usize>) -> [EightBit<'_>; 2] {
        let Self { covered, scales, moments } = self;
        let unit = parameter.unit.index();
        let codes = covered.places.of_range(parameter, range.clone());
        let scales = scales.of_range(parameter, range);
        moments.each_mut().map(|moment| EightBit {
            codes: &mut moment.codes[unit][codes.clone()],
            scales: &mut moment.scales[unit][scales.clone()],
        })
    }

    /// Elements of the tensor of a checkpoint, which this rank has.
    fn tensor(
        &self,
        (kind, parameter): (&str, ParamId),
        range: Range<usize>,
    ) -> Option<Cow<'_, [f32]>> {
        let index = TENSORS.iter().position(|(name, _)| *name == kind)?;
        let (moment, unit) = (&self.moments[index / 2], parameter.unit.index());
        self.covered.places.has(parameter).then(|| match TENSORS[index].1 {
            Spread::Blocks(block) => {
                let elements = range.start * block..range.end * block;
                Cow::Borrowed(&moment.scales[unit][self.scales.of_range(parameter, elements)])
            }
            _ => {
                let codes = &moment.codes[unit][self.covered.places.of_range(parameter, range)];
                Cow::Owned(codes.iter().copied().map(f32::from).collect())
            }
        })
    }

    /// Reads the state of this rank's pieces.
    fn read(&mut self, fabric: &Fabric, saved: &SavedState<'_>) -> Result<(), Problem> {
        self.covered.read(saved);
        for unit in fabric.plan.spec().unit_ids() {
            for piece in trained_pieces(fabric, unit) {
                let parameter = ParamId { unit, index: piece.param };
                if self.covered.places.has(parameter) {
                    self.read_piece(saved, parameter, piece.param_range())?;
                }
            }
        }
        Ok(())
    }

    fn read_piece(
        &mut self,
        saved: &SavedState<'_>,
        parameter: ParamId,
        range: Range<usize>,
    ) -> Result<(), Problem> {
        let mut codes = hsdp_kernels::zeros(range.len()).map_err(Error::from)?;
        let first_block = range.start / EIGHT_BIT_BLOCK;
        for (moment, kinds) in
            self.state(parameter, range.clone()).into_iter().zip(TENSORS.chunks(2))
        {
            saved.read((kinds[0].0, parameter), range.start, &mut codes)?;
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "codes are whole numbers from 0 to 255, and a cast saturates"
            )]
            moment.codes.iter_mut().zip(&codes).for_each(|(into, code)| *into = *code as u8);
            saved.read((kinds[1].0, parameter), first_block, moment.scales)?;
        }
        Ok(())
    }
}

/// Zeros that count as optimizer state.
fn zeros<T: bytemuck::Zeroable + Copy>(len: usize) -> Result<Vec<T>, hsdp_kernels::Error> {
    let _optimizer = memory::scope(Category::Optimizer);
    let bytes = len * size_of::<T>();
    bytemuck::allocation::try_zeroed_vec(len)
        .map_err(|()| hsdp_kernels::Error::OutOfMemory { bytes })
}

impl Optimizer for AdamW8Bit {
    fn check(&mut self, updating: &Updating<'_>, lines: &mut String) -> Result<(), Error> {
        updating.check_owner(&self.model)?;
        self.groups.check()?;
        if updating.is_on_device() {
            let what = "adamw8bit cannot update a model on a device: place it on the host";
            return Err(updating.misuse(what.to_owned()));
        }
        write!(lines, "{}", self.groups.lines()).expect("options have texts");
        match &self.held {
            Some(held) => held.covered.check(EightBitOptions::KIND, updating),
            None => {
                check_blocks(updating)?;
                let of = ("optimizer step", updating.gradients.step);
                self.held = Some(Held::zeros(updating.fabric, of, |id| updating.has(id))?);
                Ok(())
            }
        }
    }

    fn begin(&mut self, updating: &Updating<'_>) {
        self.held.as_mut().expect("`check` has made it").covered.begin(updating);
    }

    fn update(&mut self, run: Run<'_>) {
        let held = self.held.as_mut().expect("`check` has made it");
        let parameter = ParamId { unit: run.unit, index: run.piece.param };
        let EightBitOptions(options) = self.groups.of(run.unit, run.piece.param);
        let step = options.of_step(held.covered.count(parameter), run.clip);
        let state = held.state(parameter, run.piece.param_range());
        hsdp_kernels::adamw_8bit(&step, run.parameters, run.gradient, state);
    }

    fn update_on_device(&mut self, _: DeviceRun<'_>) -> Result<(), CudaError> {
        unreachable!("an update by adamw8bit on a device is refused")
    }

    fn set_learning_rate(&mut self, rate: f64) {
        self.groups.set_learning_rate(rate);
    }
}

impl Checkpointed for AdamW8Bit {
    fn head(&self, spec: &ModelSpec) -> OptimizerHead {
        let updates = self.held.iter().flat_map(|held| held.covered.counts(spec)).collect();
        let kind = EightBitOptions::KIND.to_owned();
        OptimizerHead { kind, options: self.groups.json(), updates }
    }

    fn is_of(&self, model: &ModelId) -> bool {
        self.model == *model
    }

    fn tensors(&self) -> Vec<StateTensor> {
        let held = self.held.iter();
        tensors_of(held.flat_map(|held| held.covered.parameters()))
    }

    fn expected(&self, saved: &SavedState<'_>) -> Expected {
        let counted = saved.parameters_with(&TENSORS.map(|(kind, _)| kind));
        Expected { tensors: tensors_of(counted.iter().copied()), counted }
    }

    fn state<'a>(
        &'a self,
        _: &ShardedModel,
        of: (&str, ParamId),
        range: Range<usize>,
    ) -> Result<Option<Cow<'a, [f32]>>, Error> {
        Ok(self.held.as_ref().and_then(|held| held.tensor(of, range)))
    }

    fn restored(&self, model: &ShardedModel, saved: &SavedState<'_>) -> Result<Self, Problem> {
        let has = saved.parameters_with(&TENSORS.map(|(kind, _)| kind));
        let fabric = &model.engine.fabric;
        let held = (!has.is_empty()).then(|| {
            let of = ("loading", model.committed_steps());
            let mut held = Held::zeros(fabric, of, |id| has.contains(&id))?;
            held.read(fabric, saved)?;
            Ok::<_, Problem>(held)
        });
        let (model, groups) = (self.model.clone(), self.groups.clone());
        Ok(Self { model, groups, held: held.transpose()? })
    }
}

fn tensors_of(parameters: impl Iterator<Item = ParamId>) -> Vec<StateTensor> {
    let of = |parameter| TENSORS.map(|(kind, spread)| StateTensor { kind, parameter, spread });
    parameters.flat_map(of).collect()
}

impl OptimizerOptions for EightBitOptions {
    const KIND: &'static str = "adamw8bit";

    fn learning_rate(&mut self) -> &mut f64 {
        self.0.learning_rate()
    }

    fn check(&self, of: &dyn Display) -> Result<(), Error> {
        self.0.check(of)
    }

    fn write(&self, f: &mut fmt::Formatter<'_>, of: &dyn Display) -> fmt::Result {
        self.0.write(f, of)
    }

    fn json(&self) -> Value {
        self.0.json()
    }
}
