//! The settings that a model states: a checkpoint of other ones is of another model.

use std::path::Path;

use hsdp::checkpoint::{CheckpointOptions, Checkpoints, OtherParameters, Weights};
use hsdp::{AdamW, AdamWOptions, Error, ModelOptions, ModelSpec, ShardedModel, World};
use hsdp_tests::support::models::three_units;
use hsdp_tests::support::springs;
use hsdp_tests::support::warnings::Said;
use hsdp_tests::support::worlds::{common_error, mesh, on_ranks, outcomes};
use serde_json::json;
use tracing::subscriber::with_default;

fn stated(settings: &[(&str, &str)]) -> ModelSpec {
    settings.iter().fold(three_units(), |spec, (name, value)| spec.setting(*name, value))
}

fn model(world: World, spec: &ModelSpec) -> Result<(ShardedModel, AdamW), Error> {
    let options = ModelOptions::on(mesh(1, 2));
    let model = springs::model_of(world, spec, &options)?;
    let adamw = AdamW::new(&model, AdamWOptions::default());
    Ok((model, adamw))
}

fn open(model: &ShardedModel, folder: &Path, other: OtherParameters) -> Result<Checkpoints, Error> {
    let options = CheckpointOptions { other_parameters: other, ..CheckpointOptions::default() };
    Checkpoints::open(model, folder, options)
}

fn save(folder: &Path, spec: &ModelSpec) {
    on_ranks(2, |world| {
        let (model, adamw) = model(world, spec)?;
        open(&model, folder, OtherParameters::Refuse)?.save(&model, &adamw, &json!(null))
    });
}

/// Loads the state, or the parameters alone. Returns the error of all ranks if it is refused.
fn refused(folder: &Path, spec: &ModelSpec, weights: Option<Weights>) -> Option<String> {
    let loaded = outcomes(2, |world| {
        let (mut model, mut adamw) = model(world, spec)?;
        let mut checkpoints = open(&model, folder, OtherParameters::Refuse)?;
        match weights {
            Some(weights) => checkpoints.load_latest_weights(&mut model, weights),
            None => checkpoints.load_latest(&mut model, &mut adamw),
        }
    });
    loaded.iter().any(Result::is_err).then(|| common_error(loaded).to_string())
}

const SAVED: [(&str, &str); 3] = [("heads", "4"), ("layers 0 to 2", "full"), ("eps", "1e-6")];
const OTHER: [(&str, &str); 4] =
    [("eps", "1e-6"), ("heads", "8"), ("layers 0 to 1", "full"), ("layers 2 to 2", "line\nend")];

#[test]
fn other_settings_are_refused_with_both_values_of_each() {
    let folder = tempfile::tempdir().expect("a folder");
    save(folder.path(), &stated(&SAVED));
    let [saved, other] = [&SAVED[..], &OTHER].map(stated);
    for weights in [None, Some(Weights::Trained)] {
        assert_eq!(refused(folder.path(), &saved, weights), None);
        let told = refused(folder.path(), &other, weights).expect("another number of heads");
        let path = folder.path().display();
        let expected = format!(
            "loading at step 0, on rank 0: {path}/step-00000000 is of another model: its settings \
             are others: heads is 4 there, and 8 here, \
             layers 0 to 1 is missing there, and full here, \
             layers 0 to 2 is full there, and missing here, \
             layers 2 to 2 is missing there, and line\\nend here"
        );
        assert_eq!(told, expected);
    }
}

/// A checkpoint does not state the settings that a program states since it was saved.
#[test]
fn settings_that_only_the_model_states_are_not_compared() {
    let folder = tempfile::tempdir().expect("a folder");
    save(folder.path(), &stated(&[]));
    assert_eq!(refused(folder.path(), &stated(&SAVED), None), None);
    let folder = tempfile::tempdir().expect("a folder");
    save(folder.path(), &stated(&SAVED[..1]));
    assert_eq!(refused(folder.path(), &stated(&SAVED), None), None);
    let told = refused(folder.path(), &stated(&[]), None).expect("it is missing here");
    assert!(
        told.ends_with("its settings are others: heads is 4 there, and missing here"),
        "{told}"
    );
}

/// As at the beginning of a run with other position embeddings.
#[test]
fn a_model_that_takes_what_fits_keeps_its_settings_and_warns() {
    let folder = tempfile::tempdir().expect("a folder");
    save(folder.path(), &stated(&SAVED));
    let other = stated(&OTHER[..3]);
    let next = tempfile::tempdir().expect("a folder");
    let told = on_ranks(2, |world| {
        let (mut model, mut adamw) = model(world, &other)?;
        let mut checkpoints = open(&model, folder.path(), OtherParameters::TakeFitting)?;
        let said = Said::default();
        with_default(said.clone(), || {
            checkpoints.load_latest(&mut model, &mut adamw)?;
            checkpoints.load_latest_weights(&mut model, Weights::Trained)
        })?;
        drop(checkpoints);
        open(&model, next.path(), OtherParameters::Refuse)?.save(&model, &adamw, &json!(null))?;
        Ok(said.warnings().into_iter().map(|(text, _)| text).collect::<Vec<_>>())
    });
    assert_eq!([told[0].len(), told[1].len()], [2, 0], "{told:?}");
    for text in &told[0] {
        assert!(text.contains("its settings are others: heads is 4 there, and 8 here"), "{text}");
    }
    assert_eq!(refused(next.path(), &other, None), None);
    assert!(refused(next.path(), &stated(&SAVED), None).is_some());
}
