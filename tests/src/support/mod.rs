//! Shared code of the behavior tests: small worlds, small models, a driver that plays the autograd, warnings, and the source tree.

pub mod flights;
pub mod handmade;
pub mod models;
pub mod modules;
pub mod rules;
pub mod slopes;
pub mod sources;
pub mod springs;
pub mod warnings;
pub mod worlds;
