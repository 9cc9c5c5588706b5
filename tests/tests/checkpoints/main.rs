//! Checkpoints of models: a run that goes on from one is equal to a run without an interruption,
//! and a failure leaves everything as it was.
//!
//! In reading order: `training` (a model and its optimizer), `resuming`, `meshes`, `broken`,
//! `refused`, `buffers`, `half_updated`; `faulty` (a file system with a fault), `crashes` (of the
//! files alone), `failing` (of whole saves, on each rank); `hooked` (a file system that keeps
//! waiting, or calls a test's function), `background`, `reported` (a failed save, to the next call),
//! `retried`; `options`, `settings`, `fitting` (of other parameters), `importing`, `apart` (ranks
//! whose folders differ), `reading` (alone; and going back), `trainable` (checkpoints without
//! frozen parameters).

mod apart;
mod background;
mod broken;
mod buffers;
mod crashes;
mod failing;
mod faulty;
mod fitting;
mod half_updated;
mod hooked;
mod importing;
mod meshes;
mod options;
mod reading;
mod refused;
mod reported;
mod resuming;
mod retried;
mod settings;
mod trainable;
mod training;
