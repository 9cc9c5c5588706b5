//! The elements of each tensor that a rank has.

use std::collections::BTreeMap;
use std::ops::Range;

use hsdp_checkpoint::{Elements, Slice, state_tensor};
use hsdp_sharding::{BufferId, Param, ParamId, Piece, Role, UnitId};

use super::settings::Content;
use crate::persist::checkpointed::{BufferState, Checkpointed, Spread, StateTensor};
use crate::state::context::Context;

/// Some consecutive elements of a parameter in this rank's shard.
#[derive(Clone, Debug)]
pub(super) struct Portion {
    pub(super) parameter: ParamId,
    pub(super) name: String,
    pub(super) shape: Vec<u64>,
    pub(super) role: Role,
    /// The first element, in the parameter.
    pub(super) offset: u64,
    /// The elements, in the shard.
    pub(super) range: Range<usize>,
}

impl Portion {
    /// The elements, in the parameter.
    pub(super) fn param_range(&self) -> Range<usize> {
        let start = usize::try_from(self.offset).expect("it is within the parameter");
        start..start + self.range.len()
    }
}

/// All portions that this rank has.
pub(super) fn of_rank(context: &Context) -> Vec<Portion> {
    of_pieces(context, context.plan.pieces_of(context.rank()))
}

/// Some consecutive elements of a tensor that this rank writes.
#[derive(Clone, Debug)]
pub(super) struct WrittenPortion {
    /// The tensor's name.
    name: String,
    shape: Vec<u64>,
    /// The first element, in the tensor.
    offset: u64,
    pub(super) source: WrittenFrom,
}

/// The place of elements that a rank writes.
#[derive(Clone, Debug)]
pub(super) enum WrittenFrom {
    /// In this rank's shard of a unit.
    Shard { unit: UnitId, range: Range<usize> },
    /// In a tensor of an optimizer's state.
    State { kind: &'static str, parameter: ParamId, range: Range<usize> },
    /// A buffer of this number of elements.
    Buffer { buffer: BufferId, len: usize },
    /// The values that an optimizer keeps of a buffer of this number of elements.
    BufferState { state: BufferState, len: usize },
}

impl WrittenFrom {
    /// The number of elements.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Shard { range, .. } | Self::State { range, .. } => range.len(),
            Self::Buffer { len, .. } | Self::BufferState { len, .. } => *len,
        }
    }
}

impl WrittenPortion {
    fn of_parameter(portion: &Portion) -> Self {
        let Portion { parameter, name, shape, offset, range, .. } = portion.clone();
        let source = WrittenFrom::Shard { unit: parameter.unit, range };
        Self { name, shape, offset, source }
    }

    /// Returns the elements of a tensor of state that a rank writes because of a portion of the
    /// parameter, if there are any.
    fn of_portion(context: &Context, portion: &Portion, tensor: StateTensor) -> Option<Self> {
        let held = portion.param_range();
        match tensor.spread {
            Spread::Owned { .. } => None,
            Spread::Whole(_) if held.start > 0 => None,
            spread => Self::of_state(context, tensor, spread.range(held)),
        }
    }

    /// A tensor of state that this rank writes because it owns it.
    fn of_owner(context: &Context, tensor: StateTensor) -> Option<Self> {
        match tensor.spread {
            // Where replicas have the same owners, the first replica writes.
            Spread::Owned { len, owner } if context.rank().index() == owner => {
                Self::of_state(context, tensor, 0..len)
            }
            _ => None,
        }
    }

    fn of_state(context: &Context, tensor: StateTensor, range: Range<usize>) -> Option<Self> {
        let StateTensor { kind, parameter, spread } = tensor;
        let param = &context.plan.spec()[parameter];
        let name = state_tensor(kind, &param.name);
        let shape = spread.shape(param);
        let offset = range.start as u64;
        let source = WrittenFrom::State { kind, parameter, range };
        (source.len() > 0).then_some(Self { name, shape, offset, source })
    }

    /// Returns a whole buffer, or its whole state.
    fn of_buffer(name: String, buffer: &Param, source: WrittenFrom) -> Self {
        Self { name, shape: Spread::Elements.shape(buffer), offset: 0, source }
    }

    pub(super) fn slice<'a>(&'a self, values: Elements<'a>) -> Slice<'a> {
        Slice { tensor: &self.name, shape: &self.shape, offset: self.offset, values }
    }
}

/// Returns the elements that this rank writes of a model and of the state of its optimizer, in the
/// order of its file: parameters and buffers first, then one kind of state after the other, and
/// that of buffers. Buffers change in training, so they are written whatever the content is.
pub(super) fn to_write<O: Checkpointed>(
    context: &Context,
    optimizer: &O,
    content: Content,
) -> Vec<WrittenPortion> {
    let spec = context.plan.spec();
    let buffers = context.plan.buffers_saved_by(context.rank());
    let mut portions = of_pieces(context, context.plan.pieces_saved_by(context.rank()));
    portions.retain(|portion| content.has(portion.role));
    let mut written: Vec<WrittenPortion> =
        portions.iter().map(WrittenPortion::of_parameter).collect();
    written.extend(buffers.iter().map(|id| {
        let buffer = &spec[*id];
        let source = WrittenFrom::Buffer { buffer: *id, len: buffer.numel() };
        WrittenPortion::of_buffer(buffer.name.clone(), buffer, source)
    }));
    let mut kinds = BTreeMap::<&str, BTreeMap<ParamId, StateTensor>>::new();
    for state in optimizer.tensors() {
        kinds.entry(state.kind).or_default().insert(state.parameter, state);
    }
    for of_kind in kinds.into_values() {
        let of_portion = |portion: &Portion| {
            WrittenPortion::of_portion(context, portion, *of_kind.get(&portion.parameter)?)
        };
        written.extend(portions.iter().filter_map(of_portion));
        let owned =
            of_kind.values().filter_map(|tensor| WrittenPortion::of_owner(context, *tensor));
        written.extend(owned);
    }
    let states = optimizer.buffer_states();
    written.extend(states.into_iter().filter(|state| buffers.contains(&state.buffer)).map(
        |state| {
            let buffer = &spec[state.buffer];
            let source = WrittenFrom::BufferState { state, len: buffer.numel() };
            WrittenPortion::of_buffer(state_tensor(state.kind, &buffer.name), buffer, source)
        },
    ));
    written
}

fn of_pieces(context: &Context, pieces: Vec<(UnitId, Piece)>) -> Vec<Portion> {
    let portion = |(unit, piece): (UnitId, Piece)| {
        let parameter = ParamId { unit, index: piece.param };
        let param = &context.plan.spec()[parameter];
        Portion {
            parameter,
            name: param.name.clone(),
            shape: param.shape.iter().map(|size| *size as u64).collect(),
            role: param.role,
            offset: piece.param_start as u64,
            range: piece.shard_range(),
        }
    };
    pieces.into_iter().map(portion).collect()
}
