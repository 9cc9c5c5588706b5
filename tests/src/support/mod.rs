//! Shared code of the behavior tests: small worlds, small models, a driver that plays the autograd,
//! programs for engines and for machines of steps, warnings, and the source tree.

pub mod comparison;
pub mod drawn;
pub mod events;
pub mod flights;
pub mod handmade;
pub mod machines;
pub mod models;
pub mod modules;
pub mod programs;
pub mod rules;
pub mod slopes;
pub mod sources;
pub mod springs;
pub mod warnings;
pub mod worlds;
