//! Checkpoints of models: what goes on from one is what would have gone on without, and what fails leaves everything as it was.
//!
//! In reading order: `training` (a model and its optimizer), `resuming`, `meshes`, `broken`,
//! `refused`, `half_updated`; `faulty` (a file system with a fault), `crashes` (of the files
//! alone), `failing` (of whole saves, on each rank); `hooked` (one that keeps waiting, or does what
//! a test likes), `background`, `reported` (a failed save, to the next call), `retried`; `options`,
//! `fitting` (of other parameters), `importing`, `trainable` (checkpoints without frozen
//! parameters).

mod background;
mod broken;
mod crashes;
mod failing;
mod faulty;
mod fitting;
mod half_updated;
mod hooked;
mod importing;
mod meshes;
mod options;
mod refused;
mod reported;
mod resuming;
mod retried;
mod trainable;
mod training;
