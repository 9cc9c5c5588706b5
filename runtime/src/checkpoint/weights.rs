//! Loading of parameters alone: to evaluate them, or as the beginning of another run.

use std::collections::BTreeMap;

use hsdp_checkpoint::{Generation, STATE, TensorEntry, Weights, state_tensor};

use super::checkpoints::Checkpoints;
use super::differences;
use super::load::{LoadedState, buffers_of, parameters_of};
use super::settings::Resumed;
use super::together::Undone;
use crate::error::Error;
use crate::model::ShardedModel;
use crate::model::updates::Average;
use crate::persist::problem::Problem;
use crate::state::control;

impl Checkpoints {
    /// Loads the parameters and buffers of the newest intact checkpoint into the model, as
    /// [`load_latest`](Self::load_latest) does, and nothing else: the model keeps its number of
    /// steps and its loss scale, and optimizers keep their state. Make optimizers and averages
    /// after this call. The checkpoint may be of any optimizer, or of none. With
    /// [`OtherParameters::TakeFitting`](super::OtherParameters::TakeFitting) the model takes the
    /// parameters that fit. With [`Weights::Average`], parameters that have a moving average get
    /// that.
    ///
    /// ```
    /// use hsdp::checkpoint::{CheckpointOptions, Checkpoints, Weights};
    /// use hsdp::prelude::*;
    /// use std::path::Path;
    ///
    /// /// Evaluates the newest checkpoint of a job that may be running.
    /// fn evaluate(model: &mut ShardedModel, of_job: &Path) -> Result<Option<u64>, hsdp::Error> {
    ///     let mut checkpoints =
    ///         Checkpoints::read_only(model, of_job, CheckpointOptions::default())?;
    ///     let loaded = checkpoints.load_latest_weights(model, Weights::Trained)?;
    ///     Ok(loaded.map(|loaded| loaded.step))
    /// }
    /// # let folder = tempfile::tempdir().expect("a folder");
    /// # let ends = hsdp::launch(2, WorldOptions::default(), |world| -> Result<_, hsdp::Error> {
    /// #     let spec = ModelSpec::new().unit(Unit::new("linear").param(Param::new("w", [5, 3])));
    /// #     let options = ModelOptions::on(Mesh::new(1, 2)?);
    /// #     let mut model = ShardedModel::new(world, spec, options, |_| vec![0.5; 15])?;
    /// #     assert_eq!(evaluate(&mut model, folder.path())?, None);
    /// #     let adamw = AdamW::new(&model, AdamWOptions::default());
    /// #     let with = CheckpointOptions::default();
    /// #     let mut job = Checkpoints::open(&model, folder.path(), with)?;
    /// #     job.save(&model, &adamw, &serde_json::json!({}))?;
    /// #     assert_eq!(evaluate(&mut model, folder.path())?, Some(0));
    /// #     Ok(())
    /// # });
    /// # ends.into_iter().collect::<Result<Vec<_>, _>>()?;
    /// # Ok::<(), hsdp::Error>(())
    /// ```
    ///
    /// Collective over the model's world, between steps.
    ///
    /// # Errors
    /// As [`load_latest`](Self::load_latest), and [`Error::Checkpoint`] if averages are wanted and
    /// the checkpoint has none.
    pub fn load_latest_weights(
        &mut self,
        model: &mut ShardedModel,
        weights: Weights,
    ) -> Result<Option<Resumed>, Error> {
        self.begin_load_of_weights(model)?;
        self.load_newest(model, |this, model, step| this.load_weights_of(model, weights, step))
    }

    /// Loads the parameters of the checkpoint of `step` into the model, and nothing else, as
    /// [`load_latest_weights`](Self::load_latest_weights) does.
    ///
    /// Collective over the model's world, between steps.
    ///
    /// # Errors
    /// As [`load_latest_weights`](Self::load_latest_weights), for this checkpoint alone.
    pub fn load_weights(
        &mut self,
        model: &mut ShardedModel,
        weights: Weights,
        step: u64,
    ) -> Result<Resumed, Error> {
        self.begin_load_of_weights(model)?;
        let later = self.later_than(model, step)?;
        let loaded = self.load_weights_of(model, weights, step);
        let loaded = loaded.map_err(|undone| self.loading(model, step).error(undone))?;
        Ok(self.told_of_later(model, Resumed { later, ..loaded }))
    }

    fn begin_load_of_weights(&mut self, model: &ShardedModel) -> Result<(), Error> {
        let between = || model.check_between_steps("loading");
        control::between_steps(model.world(), model.committed_steps(), between)?;
        self.settle(model)
    }

    fn load_weights_of(
        &mut self,
        model: &ShardedModel,
        weights: Weights,
        step: u64,
    ) -> Result<Resumed, Undone> {
        let wanted = self.wanted;
        let loaded = self.load_one(model, step, |saved| {
            let fitting = differences::check_weights(saved, wanted)?;
            let averages = averages(saved.generation, weights)?;
            let source = |name: &str| averages.get(name).cloned().unwrap_or_else(|| name.into());
            let parameters = parameters_of(model, &saved, fitting.as_ref(), source)?;
            let buffers = buffers_of(model, &saved, fitting.as_ref(), source)?;
            let notes = fitting.iter().filter_map(|fitting| fitting.lists.text()).collect();
            Ok((LoadedState { parameters, buffers, fitting, notes }, ()))
        });
        loaded.map(|(resumed, ())| resumed)
    }
}

/// Returns the names of tensors with the averages of parameters, by parameter.
///
/// # Errors
/// If there are none, or one has another shape than its parameter.
fn averages(
    generation: &Generation,
    weights: Weights,
) -> Result<BTreeMap<String, String>, Problem> {
    if weights == Weights::Trained {
        return Ok(BTreeMap::new());
    }
    let tensors = &generation.manifest().tensors;
    let path = generation.path().display();
    let mut averages = BTreeMap::new();
    for (name, tensor) in tensors.iter().filter(|(name, _)| !name.starts_with(STATE)) {
        let average = state_tensor(Average::KIND, name);
        let Some(TensorEntry { shape, .. }) = tensors.get(&average) else { continue };
        if *shape != tensor.shape {
            let name = average.escape_debug();
            let what = format!("{path}: `{name}` has shape {shape:?}, not {:?}", tensor.shape);
            return Err(Problem::lasting(what));
        }
        averages.insert(name.clone(), average);
    }
    if averages.is_empty() {
        let what = format!(
            "{path} has no averages: none of its tensors is named `optimizer:ema:<parameter>`"
        );
        return Err(Problem::lasting(what));
    }
    Ok(averages)
}
