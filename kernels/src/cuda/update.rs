//! Updates of parameters: division, clipping, the update and the cast in one pass; those of Muon by
//! parts of matrices.

use std::ops::Range;

use hsdp_sharding::DType;

use super::buffer::DeviceBuffer;
use super::device::{Cast, CudaKernel};
use super::error::CudaError;
use super::launch::{Argument, Launch, MOST_PIECES, Table, TablePiece, WIDTH, Writes};
use super::stream::Stream;
use crate::optimizer::{AdamWFactors, LionFactors, MuonFactors, SgdFactors};
use crate::{AdamWStep, LionStep, MomentumKind, MuonStep, SgdStep};

/// The buffers that an update reads and writes besides the state of its optimizer.
#[derive(Debug)]
pub struct DeviceUpdate<'a> {
    /// The f32 master parameters.
    pub parameters: &'a mut DeviceBuffer,
    /// The element of the shard with which `parameters` begin, a multiple of 4.
    pub first: usize,
    /// The target of a copy of the updated parameters in f16 or bf16, if one is needed, from the
    /// beginning of the shard on. The updated elements are written, and it is never read.
    pub rounded: Option<&'a mut DeviceBuffer>,
    /// The f32 gradient.
    pub gradient: &'a DeviceBuffer,
    /// The element of the shard with which `gradient` begins, a multiple of 4.
    pub gradient_first: usize,
    /// The divisor of the gradient. The quotient is computed in f64 and rounded to f32 once.
    pub divisor: f64,
}

/// Consecutive elements of one parameter, and the number of their update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PieceOfStep {
    /// The elements of the shard, which start at a multiple of 4.
    pub range: Range<usize>,
    /// The first element of their state in the buffers of state, a multiple of 4. So an optimizer
    /// may have state for some parameters alone.
    pub state: usize,
    /// The number of this update of the parameter, from 1.
    pub step: u64,
}

/// `AdamWFactors` of `update.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct DeviceAdamW {
    clip: f32,
    keep_parameter: f32,
    keep_first: f32,
    take_first: f32,
    keep_second: f32,
    take_second: f32,
    epsilon: f32,
    unused: u32,
}

/// `SgdFactors` of `update.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct DeviceSgd {
    clip: f32,
    decay: f32,
    momentum: f32,
    rate: f32,
    nesterov: u32,
    unused: u32,
}

/// `LionFactors` of `update.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct DeviceLion {
    clip: f32,
    keep_parameter: f32,
    keep_direction: f32,
    take_direction: f32,
    keep_momentum: f32,
    take_momentum: f32,
    rate: f32,
    unused: u32,
}

// SAFETY: CU-3, eight fields of 4 bytes, in the kernel's order.
unsafe impl Argument for DeviceAdamW {}
// SAFETY: CU-3, six fields of 4 bytes, in the kernel's order.
unsafe impl Argument for DeviceSgd {}
// SAFETY: CU-3, eight fields of 4 bytes, in the kernel's order.
unsafe impl Argument for DeviceLion {}

impl Stream {
    /// Makes one AdamW update of the elements of `pieces`, which are in order and do not overlap.
    /// Other elements are unchanged. `first` and `second` are the moments, f32 and as long as each
    /// other. Each piece has its own number of the update, and `step.step` is ignored.
    ///
    /// One launch updates up to 120 pieces. The bits are those of
    /// [`update_in_blocks`](crate::update_in_blocks) with [`adamw`](crate::adamw).
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if a buffer has the wrong dtype or length or is of another device,
    /// or if a piece or its state is out of order, lies outside of the gradient or the buffers of
    /// state, or does not start at a multiple of 4, or if a piece has update number 0;
    /// [`CudaError::Driver`] if a call of the driver fails.
    pub fn adamw(
        &self,
        update: DeviceUpdate<'_>,
        pieces: &[PieceOfStep],
        step: &AdamWStep,
        first: &mut DeviceBuffer,
        second: &mut DeviceBuffer,
    ) -> Result<(), CudaError> {
        update.check("adamw", pieces)?;
        check_state("adamw", pieces, [first, second])?;
        let factors = device_adamw(&AdamWFactors::of(&AdamWStep { step: 1, ..*step }));
        let entry = |piece: &PieceOfStep| {
            let own = AdamWFactors::of(&AdamWStep { step: piece.step, ..*step });
            entry(piece, own.rate, own.second_root)
        };
        let states = [Some(first), Some(second)];
        // SAFETY: CU-5, pieces lie within the gradient, and their state within its buffers; the
        // kernel has two states, and these factors.
        unsafe { self.launch(update, pieces, entry, CudaKernel::AdamW, &factors, states) }
    }

    /// Makes one SGD update of the elements of `pieces`, which are in order and do not overlap.
    /// Other elements are unchanged. `velocity` is f32.
    ///
    /// One launch updates up to 120 pieces. The bits are those of
    /// [`update_in_blocks`](crate::update_in_blocks) with [`sgd`](crate::sgd).
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] in the cases of [`adamw`](Self::adamw), and if `step.momentum` is
    /// not 0 and there is no velocity; [`CudaError::Driver`] if a call of the driver fails.
    pub fn sgd(
        &self,
        update: DeviceUpdate<'_>,
        pieces: &[PieceOfStep],
        step: &SgdStep,
        velocity: Option<&mut DeviceBuffer>,
    ) -> Result<(), CudaError> {
        update.check("sgd", pieces)?;
        match velocity.as_deref() {
            Some(velocity) => check_state("sgd", pieces, [velocity])?,
            None if step.momentum != 0.0 => {
                let problem = format!("momentum {} without a velocity", step.momentum);
                return Err(CudaError::Mismatch { operation: "sgd", problem });
            }
            None => {}
        }
        let factors = device_sgd(&SgdFactors::of(step), step.kind);
        let entry = |piece: &PieceOfStep| entry(piece, 0.0, 0.0);
        // SAFETY: CU-5, pieces lie within the gradient, and their state within its buffer; the
        // kernel has one state, and these factors.
        unsafe { self.launch(update, pieces, entry, CudaKernel::Sgd, &factors, [velocity]) }
    }

    /// Makes one Lion update of the elements of `pieces`, which are in order and do not overlap.
    /// Other elements are unchanged. `momentum` is f32.
    ///
    /// One launch updates up to 120 pieces. The bits are those of
    /// [`update_in_blocks`](crate::update_in_blocks) with [`lion`](crate::lion).
    ///
    /// # Errors
    /// Errors of [`adamw`](Self::adamw).
    pub fn lion(
        &self,
        update: DeviceUpdate<'_>,
        pieces: &[PieceOfStep],
        step: &LionStep,
        momentum: &mut DeviceBuffer,
    ) -> Result<(), CudaError> {
        update.check("lion", pieces)?;
        check_state("lion", pieces, [momentum])?;
        let factors = device_lion(&LionFactors::of(step));
        let entry = |piece: &PieceOfStep| entry(piece, 0.0, 0.0);
        // SAFETY: CU-5, pieces lie within the gradient, and their state within its buffer; the
        // kernel has one state, and these factors.
        unsafe { self.launch(update, pieces, entry, CudaKernel::Lion, &factors, [Some(momentum)]) }
    }

    /// Launches a kernel for all pieces. A state that is not there has address 0.
    ///
    /// # Safety
    /// CU-5: the pieces lie within the buffers, and their state within each buffer of state. The
    /// kernel takes as many states, and these factors.
    unsafe fn launch<F: Argument, const STATES: usize>(
        &self,
        update: DeviceUpdate<'_>,
        pieces: &[PieceOfStep],
        entry: impl Fn(&PieceOfStep) -> TablePiece,
        kernel: fn(Cast) -> CudaKernel,
        factors: &F,
        mut states: [Option<&mut DeviceBuffer>; STATES],
    ) -> Result<(), CudaError> {
        let elements = [update.origin(), update.gradient_origin()];
        let DeviceUpdate { parameters, mut rounded, gradient, divisor, .. } = update;
        let own = states.each_ref().map(|it| it.as_deref().map_or(0, |state| state.address(0)));
        let (cast, address) = cast_of(rounded.as_deref(), 0);
        for part in pieces.chunks(MOST_PIECES) {
            let (table, len) = table(part, &entry);
            let launch = Launch::over(kernel(cast), len).argument(&table);
            let launch = elements.iter().chain(&own).fold(launch, Launch::argument);
            let launch = launch.argument(&address).argument(&divisor).argument(factors);
            let mut writes: Writes<'_> = [&mut *parameters].into_iter().collect();
            writes.extend(states.iter_mut().filter_map(Option::as_deref_mut));
            writes.extend(rounded.as_deref_mut());
            // SAFETY: CU-5, the caller's promise is passed on.
            unsafe { launch.issue(self, &[gradient], &mut writes) }?;
        }
        Ok(())
    }
}

impl DeviceUpdate<'_> {
    /// Checks the dtypes of the buffers, and returns the elements of the shard that all of them
    /// have.
    pub(super) fn check_buffers(&self, operation: &'static str) -> Result<Range<usize>, CudaError> {
        let Self { parameters, first, rounded, gradient, gradient_first, .. } = self;
        parameters.check(operation, DType::F32, parameters.len())?;
        gradient.check(operation, DType::F32, gradient.len())?;
        let end_of = |first: usize, buffer: &DeviceBuffer| {
            let len = buffer.len();
            first.checked_add(len).ok_or_else(|| {
                let problem =
                    format!("a buffer of {len} elements cannot begin with element {first}");
                CudaError::Mismatch { operation, problem }
            })
        };
        let mut end = end_of(*first, parameters)?.min(end_of(*gradient_first, gradient)?);
        if let Some(rounded) = rounded {
            let dtype = if rounded.dtype() == DType::F16 { DType::F16 } else { DType::BF16 };
            rounded.check(operation, dtype, rounded.len())?;
            end = end.min(rounded.len());
        }
        let firsts = [*first, *gradient_first];
        if firsts.iter().any(|first| !first.is_multiple_of(WIDTH)) {
            let problem = format!("buffers begin with elements {firsts:?}, not multiples of 4");
            return Err(CudaError::Mismatch { operation, problem });
        }
        Ok(firsts[0].max(firsts[1])..end)
    }

    /// Returns the address that element 0 of the shard has relative to the parameters.
    fn origin(&self) -> u64 {
        origin(self.parameters.address(0), self.first)
    }

    /// Returns the address that element 0 of the shard has relative to the gradient.
    fn gradient_origin(&self) -> u64 {
        origin(self.gradient.address(0), self.gradient_first)
    }

    /// Checks that the pieces lie within all buffers.
    fn check(&self, operation: &'static str, pieces: &[PieceOfStep]) -> Result<(), CudaError> {
        let all = self.check_buffers(operation)?;
        let mut end = all.start;
        for PieceOfStep { range, step, .. } in pieces {
            let fits = range.start >= end && range.start <= range.end && range.end <= all.end;
            if !fits || !range.start.is_multiple_of(WIDTH) || *step == 0 {
                let problem = format!(
                    "piece {range:?} of update {step} is invalid: it must start at a multiple of 4 from {end} on, \
                     lie within elements {all:?}, and updates count from 1"
                );
                return Err(CudaError::Mismatch { operation, problem });
            }
            end = range.end;
        }
        Ok(())
    }
}

/// Returns the address that element 0 of a shard would have. A buffer at `address` has the elements
/// of that shard from `first` on, in f32. The kernels add the index of an element to the result,
/// and wrap as this does.
fn origin(address: u64, first: usize) -> u64 {
    address.wrapping_sub((first as u64).wrapping_mul(size_of::<f32>() as u64))
}

/// Checks that the state of all pieces lies within buffers of one length, in order.
fn check_state<const COUNT: usize>(
    operation: &'static str,
    pieces: &[PieceOfStep],
    buffers: [&DeviceBuffer; COUNT],
) -> Result<(), CudaError> {
    let len = buffers[0].len();
    buffers.into_iter().try_for_each(|buffer| buffer.check(operation, DType::F32, len))?;
    let mut end = 0;
    for PieceOfStep { range, state, .. } in pieces {
        let own = range.len();
        let fits = *state >= end && state.checked_add(own).is_some_and(|last| last <= len);
        if !fits || !state.is_multiple_of(WIDTH) {
            let problem = format!(
                "the state of piece {range:?} is invalid: it starts at element {state}, but must start at a multiple of 4 \
                 from {end} on, and its {own} elements must lie within {len}"
            );
            return Err(CudaError::Mismatch { operation, problem });
        }
        end = state + own;
    }
    Ok(())
}

/// The cast for this buffer, and the address of an element. Its dtype has been checked.
pub(super) fn cast_of(rounded: Option<&DeviceBuffer>, index: usize) -> (Cast, u64) {
    let cast = |dtype| if dtype == DType::F16 { Cast::F16 } else { Cast::BF16 };
    rounded.map_or((Cast::Alone, 0), |it| (cast(it.dtype()), it.address(index)))
}

fn entry(piece: &PieceOfStep, rate: f32, second_root: f32) -> TablePiece {
    let PieceOfStep { range, state, .. } = piece;
    let start = range.start as u64;
    let len = range.len() as u64;
    TablePiece { start, len, state: *state as u64, rate, second_root }
}

/// The table of pieces, of which there is at least one, and the number of elements from the first
/// to the last.
fn table(
    pieces: &[PieceOfStep],
    entry: impl Fn(&PieceOfStep) -> TablePiece,
) -> (Table<TablePiece, MOST_PIECES>, usize) {
    let [begin, end] =
        [pieces.first().map(|it| it.range.start), pieces.last().map(|it| it.range.end)];
    let elements = end.unwrap_or(0) - begin.unwrap_or(0);
    (Table::of(pieces.iter().map(entry)), elements)
}

fn device_adamw(factors: &AdamWFactors) -> DeviceAdamW {
    DeviceAdamW {
        clip: factors.clip,
        keep_parameter: factors.keep_parameter,
        keep_first: factors.keep_first,
        take_first: factors.take_first,
        keep_second: factors.keep_second,
        take_second: factors.take_second,
        epsilon: factors.epsilon,
        unused: 0,
    }
}

fn device_sgd(factors: &SgdFactors, kind: MomentumKind) -> DeviceSgd {
    DeviceSgd {
        clip: factors.clip,
        decay: factors.decay,
        momentum: factors.momentum,
        rate: factors.rate,
        nesterov: u32::from(kind == MomentumKind::Nesterov),
        unused: 0,
    }
}

fn device_lion(factors: &LionFactors) -> DeviceLion {
    DeviceLion {
        clip: factors.clip,
        keep_parameter: factors.keep_parameter,
        keep_direction: factors.keep_direction,
        take_direction: factors.take_direction,
        keep_momentum: factors.keep_momentum,
        take_momentum: factors.take_momentum,
        rate: factors.rate,
        unused: 0,
    }
}

/// Consecutive elements of a matrix in the buffers of a Muon update. They may start anywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartOfMatrix {
    /// The number of elements.
    pub len: usize,
    /// The first element, in the shard.
    pub shard: usize,
    /// The first element in the momentum.
    pub state: usize,
    /// The first element in the direction.
    pub direction: usize,
}

/// `MuonFactors` of `muon.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct DeviceMuon {
    clip: f32,
    take: f32,
    keep: f32,
    rate: f32,
    nesterov: u32,
    unused: u32,
}

// SAFETY: CU-3, six fields of 4 bytes, in the kernel's order.
unsafe impl Argument for DeviceMuon {}

impl Stream {
    /// Computes the direction that is orthogonalized, for a part of a matrix: of the gradient,
    /// which is divided, and of the momentum, which does not change. All buffers are f32. Only the
    /// part's elements of `direction` are written.
    ///
    /// The call makes one launch. The bits are those of [`muon_direction`](crate::muon_direction).
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if a buffer is not f32 or is of another device, or if the part does
    /// not lie in a buffer; [`CudaError::Driver`] if a call of the driver fails.
    pub fn muon_direction(
        &self,
        direction: &mut DeviceBuffer,
        gradient: &DeviceBuffer,
        divisor: f64,
        part: &PartOfMatrix,
        step: &MuonStep,
        momentum: &DeviceBuffer,
    ) -> Result<(), CudaError> {
        let from = part.within("muon_direction", gradient, part.shard)?;
        let state = part.within("muon_direction", momentum, part.state)?;
        let to = part.within("muon_direction", direction, part.direction)?;
        let len = part.len as u64;
        let factors = device_muon(step);
        let launch = Launch::over(CudaKernel::MuonDirection, part.len)
            .argument(&to)
            .argument(&from)
            .argument(&state)
            .argument(&len)
            .argument(&divisor)
            .argument(&factors);
        // SAFETY: CU-5, the part lies in each buffer.
        unsafe { launch.issue(self, &[gradient, momentum], &mut [direction]) }
    }

    /// Makes one Muon update of a part of a matrix, along the orthogonalized direction. Other
    /// elements are unchanged. `direction` and `momentum` are f32.
    ///
    /// The call makes one launch. The bits are those of
    /// [`update_in_blocks`](crate::update_in_blocks) with [`muon`](crate::muon).
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if a buffer has the wrong dtype or length or is of another device,
    /// or if the part does not lie in a buffer; [`CudaError::Driver`] if a call of the driver
    /// fails.
    pub fn muon(
        &self,
        update: DeviceUpdate<'_>,
        part: &PartOfMatrix,
        step: &MuonStep,
        direction: &DeviceBuffer,
        momentum: &mut DeviceBuffer,
    ) -> Result<(), CudaError> {
        let all = update.check_buffers("muon")?;
        let end = part.shard.checked_add(part.len);
        if part.shard < all.start || end.is_none_or(|end| end > all.end) {
            let problem = format!("{part:?} does not lie within elements {all:?}");
            return Err(CudaError::Mismatch { operation: "muon", problem });
        }
        let DeviceUpdate { parameters, first, rounded, gradient, gradient_first, divisor } = update;
        let from = gradient.address(part.shard - gradient_first);
        let along = part.within("muon", direction, part.direction)?;
        let state = part.within("muon", momentum, part.state)?;
        let to = parameters.address(part.shard - first);
        let (cast, address) = cast_of(rounded.as_deref(), part.shard);
        let len = part.len as u64;
        let factors = device_muon(step);
        let launch = Launch::over(CudaKernel::Muon(cast), part.len)
            .argument(&to)
            .argument(&from)
            .argument(&along)
            .argument(&state)
            .argument(&address)
            .argument(&len)
            .argument(&divisor)
            .argument(&factors);
        let mut writes: Writes<'_> = [parameters, momentum].into_iter().chain(rounded).collect();
        // SAFETY: CU-5, the part lies in each buffer.
        unsafe { launch.issue(self, &[gradient, direction], &mut writes) }
    }
}

impl PartOfMatrix {
    /// The address of the part in an f32 buffer, from an element on.
    fn within(
        &self,
        operation: &'static str,
        buffer: &DeviceBuffer,
        start: usize,
    ) -> Result<u64, CudaError> {
        buffer.check(operation, DType::F32, buffer.len())?;
        let len = buffer.len();
        if start.checked_add(self.len).is_some_and(|end| end <= len) {
            return Ok(buffer.address(start));
        }
        let problem = format!("{self:?} does not lie in a buffer of {len} elements");
        Err(CudaError::Mismatch { operation, problem })
    }
}

fn device_muon(step: &MuonStep) -> DeviceMuon {
    let MuonFactors { clip, take, keep, rate } = MuonFactors::of(step);
    let nesterov = u32::from(step.kind == MomentumKind::Nesterov);
    DeviceMuon { clip, take, keep, rate, nesterov, unused: 0 }
}
