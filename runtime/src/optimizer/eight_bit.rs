//! AdamW with state of 8 bits an element.

use std::borrow::Cow;
use std::ops::Range;

use hsdp_kernels::memory::{self, Category};
use hsdp_kernels::{EIGHT_BIT_BLOCK, EightBit};
use hsdp_sharding::{Granularity, Param, ParamId, UnitId};

use crate::error::Error;
use crate::model::ShardedModel;
use crate::optimizer::adamw::{AdamW, AdamWOptions};
use crate::optimizer::covered::Covered;
use crate::optimizer::groups::Groups;
use crate::optimizer::held::Kinds;
use crate::optimizer::method::{Kept, Method, Traits, Updates};
use crate::optimizer::pieces::trained_pieces;
use crate::optimizer::places::{Packing, Places};
use crate::optimizer::run::Run;
use crate::persist::checkpointed::{Spread, StateTensor};
use crate::persist::problem::Problem;
use crate::persist::saved::StateSource;
use crate::state::context::{Context, ErrorSite};

impl AdamW {
    /// AdamW whose moments take 8 bits an element, in blocks of 256 elements with a scale each (Dettmers et al., arXiv 2110.02861), for
    /// this rank's shards of a model on the host. Its kind is `adamw8bit`.
    ///
    /// A rank keeps two bytes for each element and two f32 for each block. Parameters declare their blocks before the plan is made
    /// ([`Param::blocks`]`(256)`), so that shards are cut between blocks, and the bits of an update are the same on any mesh. The first
    /// update refuses others by name.
    ///
    /// A checkpoint has the codes, from 0 to 255, as f32, and the scales.
    #[must_use]
    pub fn with_eight_bit_state(model: &ShardedModel, options: AdamWOptions) -> Self {
        Self::of(model, &EightBitState, options)
    }
}

/// The method of AdamW with state of 8 bits.
#[derive(Debug)]
struct EightBitState;

/// The moments in 8 bits.
#[derive(Debug)]
struct EightBitMoments {
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
const KINDS: Kinds = &["exp_avg_code", "exp_avg_scale", "exp_avg_sq_code", "exp_avg_sq_scale"];

/// Checks that the parameters are cut between blocks, whatever the mesh.
fn check_blocks(context: &Context, has: &dyn Fn(ParamId) -> bool) -> Result<(), Error> {
    let is_cut_within = |param: &Param| match param.granularity {
        Granularity::Blocks(block) => !block.is_multiple_of(EIGHT_BIT_BLOCK),
        Granularity::Element | Granularity::Rows(_) => true,
    };
    let mut params = context.plan.spec().params();
    match params.find(|(id, param)| has(*id) && is_cut_within(param)) {
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

impl EightBitMoments {
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
        let index = KINDS.iter().position(|it| *it == kind)?;
        let (moment, unit) = (&self.moments[index / 2], parameter.unit.index());
        self.covered.places.has(parameter).then(|| match spread_of(index) {
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

    fn read_piece(
        &mut self,
        saved: &dyn StateSource,
        parameter: ParamId,
        range: Range<usize>,
    ) -> Result<(), Problem> {
        let mut codes = hsdp_kernels::zeros(range.len()).map_err(Error::from)?;
        let first_block = range.start / EIGHT_BIT_BLOCK;
        for (moment, kinds) in self.state(parameter, range.clone()).into_iter().zip(KINDS.chunks(2))
        {
            saved.read((kinds[0], parameter), range.start, &mut codes)?;
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "codes are whole numbers from 0 to 255, and a cast saturates"
            )]
            moment.codes.iter_mut().zip(&codes).for_each(|(into, code)| *into = *code as u8);
            saved.read((kinds[1], parameter), first_block, moment.scales)?;
        }
        Ok(())
    }
}

/// The spread of a tensor, by its index in `KINDS`.
fn spread_of(index: usize) -> Spread {
    match index % 2 {
        0 => Spread::Elements,
        _ => Spread::Blocks(EIGHT_BIT_BLOCK),
    }
}

/// Zeros that count as optimizer state.
fn zeros<T: bytemuck::Zeroable + Copy>(len: usize) -> Result<Vec<T>, hsdp_kernels::Error> {
    let _optimizer = memory::scope(Category::Optimizer);
    let bytes = len * size_of::<T>();
    bytemuck::allocation::try_zeroed_vec(len)
        .map_err(|()| hsdp_kernels::Error::OutOfMemory { bytes })
}

impl Kept for EightBitMoments {
    fn covered(&self) -> &Covered {
        &self.covered
    }

    fn covered_mut(&mut self) -> &mut Covered {
        &mut self.covered
    }

    fn elements<'a>(
        &'a self,
        _: &Context,
        of: (&str, ParamId),
        range: Range<usize>,
    ) -> Result<Option<Cow<'a, [f32]>>, Error> {
        Ok(self.tensor(of, range))
    }

    fn read(&mut self, context: &Context, saved: &dyn StateSource) -> Result<(), Problem> {
        for unit in context.plan.spec().unit_ids() {
            for piece in trained_pieces(context, unit) {
                let parameter = ParamId { unit, index: piece.param };
                if self.covered.places.has(parameter) {
                    self.read_piece(saved, parameter, piece.param_range())?;
                }
            }
        }
        Ok(())
    }
}

impl Method<AdamWOptions> for EightBitState {
    fn kind(&self) -> &'static str {
        "adamw8bit"
    }

    fn traits(&self) -> Traits {
        Traits { counts: true, is_collective: false, on_device: false }
    }

    fn kinds(&self, _: &AdamWOptions) -> Kinds {
        KINDS
    }

    fn tensors(&self, _: &AdamWOptions, parameter: ParamId, _: &Param) -> Vec<StateTensor> {
        let kinds = KINDS.iter().enumerate();
        kinds.map(|(at, kind)| StateTensor { kind, parameter, spread: spread_of(at) }).collect()
    }

    fn zeros(
        &self,
        _: &Groups<AdamWOptions>,
        site: ErrorSite<'_>,
        has: &dyn Fn(ParamId) -> bool,
    ) -> Result<Box<dyn Updates<AdamWOptions>>, Error> {
        let context = site.context;
        check_blocks(context, has)?;
        let blocks = Packing { block: EIGHT_BIT_BLOCK, quantum: 1 };
        let scales = Places::of(context, blocks, has);
        let covered = Covered::of(context, has);
        let moment = || {
            let failed = |unit| move |error| site.memory(UnitId::new(unit), error);
            let codes = covered.places.lens().enumerate();
            let codes = codes.map(|(unit, len)| zeros(len).map_err(failed(unit)));
            let codes = codes.collect::<Result<_, _>>()?;
            let scales = scales.lens().enumerate();
            let scales = scales.map(|(unit, len)| zeros(len).map_err(failed(unit)));
            Ok::<_, Error>(Moment { codes, scales: scales.collect::<Result<_, _>>()? })
        };
        let moments = [moment()?, moment()?];
        Ok(Box::new(EightBitMoments { covered, scales, moments }))
    }
}

impl Updates<AdamWOptions> for EightBitMoments {
    fn update(&mut self, groups: &Groups<AdamWOptions>, run: Run<'_>) {
        let parameter = ParamId { unit: run.unit, index: run.piece.param };
        let options = groups.of(run.unit, run.piece.param);
        let step = options.of_step(self.covered.count(parameter), run.clip);
        let state = self.state(parameter, run.piece.param_range());
        hsdp_kernels::adamw_8bit(&step, run.parameters, run.gradient, state);
    }
}
