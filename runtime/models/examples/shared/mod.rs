//! The parts that programs which train have in common: how ranks run and agree, the files of a run, checkpoints, signals, tables.
//!
//! `train_gpt` and `finetune` include this folder as a module. In reading order: `options` and `recipe` (the command line),
//! `program`, `ranks`, `launch`, `agreement` (before training), `ending` (after it), `progress`, `norms`, `output`, `plot`, `trace` and `switch` (files),
//! `saving` and `signals`, `costs`, `messages` and `tables` (plan against measurement), `markdown` (a text), `device`, `environment` (threads and allocator), `failure`.

pub(crate) mod agreement;
pub(crate) mod costs;
pub(crate) mod device;
pub(crate) mod ending;
mod environment;
pub(crate) mod failure;
pub(crate) mod launch;
pub(crate) mod markdown;
pub(crate) mod messages;
pub(crate) mod norms;
pub(crate) mod options;
pub(crate) mod output;
mod plot;
pub(crate) mod program;
pub(crate) mod progress;
pub(crate) mod ranks;
pub(crate) mod recipe;
pub(crate) mod saving;
pub(crate) mod signals;
pub(crate) mod size;
mod switch;
pub(crate) mod tables;
pub(crate) mod trace;
