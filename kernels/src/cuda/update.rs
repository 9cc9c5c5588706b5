//! Updates of parameters: division, clipping, the update and the cast in one pass.

use std::ops::Range;

use hsdp_sharding::DType;

use super::buffer::DeviceBuffer;
use super::error::CudaError;
use super::launch::{Argument, Launch, WIDTH, Writes};
use super::source::{Cast, Kernel};
use super::stream::Stream;
use super::table::{MOST_PIECES, Piece, Table};
use crate::optimizer::{AdamWFactors, SgdFactors};
use crate::{AdamWStep, MomentumKind, SgdStep};

/// What an update reads and writes beside the state of its optimizer, which is as long as the gradient.
#[derive(Debug)]
pub struct DeviceUpdate<'a> {
    /// f32 master parameters: at least as many as the gradient has elements. Those behind are not trained.
    pub parameters: &'a mut DeviceBuffer,
    /// Where the updated parameters are also wanted, rounded to f16 or bf16, as long as these: written, and never read.
    pub rounded: Option<&'a mut DeviceBuffer>,
    /// f32.
    pub gradient: &'a DeviceBuffer,
    /// By what the gradient is divided, in f64 and rounded to f32 once.
    pub divisor: f64,
}

/// A run of elements of one parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PieceOfStep {
    /// Its elements; the first is a multiple of 4.
    pub range: Range<usize>,
    /// Which update of this parameter it is, from 1.
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

// SAFETY: CU-3, eight fields of 4 bytes, in the kernel's order.
unsafe impl Argument for DeviceAdamW {}
// SAFETY: CU-3, six fields of 4 bytes, in the kernel's order.
unsafe impl Argument for DeviceSgd {}

impl Stream {
    /// One AdamW update of the elements of `pieces`, in their order, without overlap; others stay as they are. `moments`: the first
    /// and the second, f32, as long as the gradient. `step.step` is each piece's own.
    ///
    /// One launch for up to 120 pieces. The bits are those of [`update_in_blocks`](crate::update_in_blocks) with
    /// [`adamw`](crate::adamw).
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if a buffer or a piece does not fit; [`CudaError::Driver`].
    pub fn adamw(
        &self,
        update: DeviceUpdate<'_>,
        pieces: &[PieceOfStep],
        step: &AdamWStep,
        (first, second): (&mut DeviceBuffer, &mut DeviceBuffer),
    ) -> Result<(), CudaError> {
        let len = update.check("adamw", pieces)?;
        first.check("adamw", DType::F32, len)?;
        second.check("adamw", DType::F32, len)?;
        let DeviceUpdate { parameters, mut rounded, gradient, divisor } = update;
        let factors = device_adamw(&AdamWFactors::of(&AdamWStep { step: 1, ..*step }));
        let addresses = [parameters, gradient, first, second].map(|buffer| buffer.address(0));
        let (cast, address) = cast_of(rounded.as_deref());
        for part in pieces.chunks(MOST_PIECES) {
            let piece = |piece: &PieceOfStep| {
                let own = AdamWFactors::of(&AdamWStep { step: piece.step, ..*step });
                entry(piece, (own.rate, own.second_root))
            };
            let (table, elements) = table(part, piece);
            let launch = Launch::over(Kernel::AdamW(cast), elements).argument(&table);
            let launch = addresses.iter().fold(launch, Launch::argument);
            let launch = launch.argument(&address).argument(&divisor).argument(&factors);
            let mut writes: Writes<'_> =
                [&mut *parameters, &mut *first, &mut *second].into_iter().collect();
            writes.extend(rounded.as_deref_mut());
            // SAFETY: CU-5, pieces lie within the gradient, and no buffer is shorter.
            unsafe { launch.issue(self, (&[gradient], &mut writes)) }?;
        }
        Ok(())
    }

    /// One SGD update of the elements of `pieces`, in their order, without overlap; others stay as they are. `velocity`: f32, as
    /// long as the gradient.
    ///
    /// One launch for up to 120 pieces. The bits are those of [`update_in_blocks`](crate::update_in_blocks) with
    /// [`sgd`](crate::sgd).
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if a buffer or a piece does not fit, or there is momentum and no velocity;
    /// [`CudaError::Driver`].
    pub fn sgd(
        &self,
        update: DeviceUpdate<'_>,
        pieces: &[PieceOfStep],
        step: &SgdStep,
        mut velocity: Option<&mut DeviceBuffer>,
    ) -> Result<(), CudaError> {
        let len = update.check("sgd", pieces)?;
        match &velocity {
            Some(velocity) => velocity.check("sgd", DType::F32, len)?,
            None if step.momentum != 0.0 => {
                let problem = format!("momentum {} without a velocity", step.momentum);
                return Err(CudaError::Mismatch { operation: "sgd", problem });
            }
            None => {}
        }
        let DeviceUpdate { parameters, mut rounded, gradient, divisor } = update;
        let factors = device_sgd(&SgdFactors::of(step), step.kind);
        let own = velocity.as_deref().map_or(0, |velocity| velocity.address(0));
        let addresses = [parameters.address(0), gradient.address(0), own];
        let (cast, address) = cast_of(rounded.as_deref());
        for part in pieces.chunks(MOST_PIECES) {
            let (table, elements) = table(part, |piece| entry(piece, (0.0, 0.0)));
            let launch = Launch::over(Kernel::Sgd(cast), elements).argument(&table);
            let launch = addresses.iter().fold(launch, Launch::argument);
            let launch = launch.argument(&address).argument(&divisor).argument(&factors);
            let mut writes: Writes<'_> = [&mut *parameters].into_iter().collect();
            writes.extend(velocity.as_deref_mut().into_iter().chain(rounded.as_deref_mut()));
            // SAFETY: CU-5, pieces lie within the gradient, and no buffer is shorter.
            unsafe { launch.issue(self, (&[gradient], &mut writes)) }?;
        }
        Ok(())
    }
}

impl DeviceUpdate<'_> {
    /// The length of the gradient, if the pieces lie within, and the other buffers fit it.
    fn check(&self, operation: &'static str, pieces: &[PieceOfStep]) -> Result<usize, CudaError> {
        let (len, all) = (self.gradient.len(), self.parameters.len());
        self.parameters.check(operation, DType::F32, all.max(len))?;
        self.gradient.check(operation, DType::F32, len)?;
        if let Some(rounded) = &self.rounded {
            let dtype = if rounded.dtype() == DType::F16 { DType::F16 } else { DType::BF16 };
            rounded.check(operation, dtype, all)?;
        }
        let mut end = 0;
        for PieceOfStep { range, step } in pieces {
            let fits = range.start >= end && range.start <= range.end && range.end <= len;
            if !fits || !range.start.is_multiple_of(WIDTH) || *step == 0 {
                let problem = format!("a piece of {range:?} of {len}, update {step}, after {end}");
                return Err(CudaError::Mismatch { operation, problem });
            }
            end = range.end;
        }
        Ok(len)
    }
}

/// What parameters are cast to for this buffer, and where it is. Its dtype has been checked.
fn cast_of(rounded: Option<&DeviceBuffer>) -> (Cast, u64) {
    let cast = |dtype| if dtype == DType::F16 { Cast::F16 } else { Cast::BF16 };
    rounded.map_or((Cast::Alone, 0), |it| (cast(it.dtype()), it.address(0)))
}

fn entry(piece: &PieceOfStep, (rate, second_root): (f32, f32)) -> Piece {
    let PieceOfStep { range, .. } = piece;
    Piece { start: range.start as u64, len: range.len() as u64, rate, second_root }
}

/// The table of some pieces, which are not none, and the elements from the first to the last.
fn table(
    pieces: &[PieceOfStep],
    entry: impl Fn(&PieceOfStep) -> Piece,
) -> (Table<Piece, MOST_PIECES>, usize) {
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
