//! Optimizer updates of parameters, in f32, by PyTorch's formulas. Each update documents its order
//! of operations. This order is not PyTorch's, where `lerp` and `addcdiv` round at other places, so
//! results agree except for rounding.

pub mod adafactor;
mod adamw;
mod blocks;
mod dynamic_map;
mod eight_bit;
mod lion;
mod muon;
mod newton_schulz;
mod sgd;

pub(crate) use adamw::AdamWFactors;
pub use adamw::{AdamWStep, adamw};
pub use blocks::{FusedUpdate, UPDATE_BLOCK, update_in_blocks};
pub use eight_bit::{EIGHT_BIT_BLOCK, EightBit, adamw_8bit};
pub(crate) use lion::LionFactors;
pub use lion::{LionStep, lion};
pub(crate) use muon::MuonFactors;
pub use muon::{MuonStep, muon, muon_direction};
pub use newton_schulz::{MatrixDType, NewtonSchulz};
pub(crate) use sgd::SgdFactors;
pub use sgd::{MomentumKind, SgdStep, sgd};
