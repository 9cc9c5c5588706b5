//! The folder of an export, without a run.

use std::collections::BTreeMap;
use std::fs;

use hsdp_models::decoder::{Decoder, Export, ExportError, Pretrained};

use super::place::Place;

/// Prepares an export of the model to `tuned`, and writes it: all parameters are zeros, and one of
/// them is `left_out`.
fn export(place: &Place, left_out: Option<&str>) -> Result<(), ExportError> {
    let from = Pretrained::open(&place.path("model")).expect("a model");
    let decoder = Decoder::new(from.config().clone());
    let recorded = decoder.recorded().expect("a model");
    let export = Export::prepare(&place.path("tuned"), Some(&from), &decoder)?;
    let mut zeros: BTreeMap<String, Vec<f32>> =
        recorded.params().map(|it| (it.name.clone(), vec![0.0; it.numel()])).collect();
    zeros.retain(|name, _| Some(name.as_str()) != left_out);
    export.write(&zeros)
}

#[test]
fn all_files_of_a_tokenizer_are_copied() {
    let place = Place::new();
    fs::create_dir(place.path("model/additional_chat_templates")).expect("a folder");
    let names = [
        "added_tokens.json",
        "additional_chat_templates/tools.jinja",
        "chat_template.jinja",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "tekken.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
    ];
    for name in names {
        fs::write(place.path("model").join(name), "{}").expect("written");
    }
    // The second export replaces the files of the first.
    for _ in 0..2 {
        export(&place, None).expect("exported");
        for name in names {
            assert_eq!(fs::read(place.path("tuned").join(name)).ok(), Some(b"{}".into()), "{name}");
        }
    }
    // Without it in the source, the file of the export is of another model.
    for name in names {
        let path = place.path("model").join(name);
        fs::remove_file(&path).expect("there");
        let refused = export(&place, None).expect_err("a stale file").to_string();
        assert!(refused.ends_with(&format!("it holds {name}, of another model")), "{refused}");
        fs::write(path, "{}").expect("written");
    }
}

#[test]
fn an_export_without_a_parameter_replaces_no_file() {
    let place = Place::new();
    fs::create_dir(place.path("tuned")).expect("a folder");
    fs::write(place.path("tuned/config.json"), "old").expect("written");
    let missing = export(&place, Some("model.norm.weight")).expect_err("a parameter is missing");
    assert!(matches!(missing, ExportError::Missing { .. }), "{missing}");
    let files = fs::read_dir(place.path("tuned")).expect("a folder");
    assert_eq!(files.count(), 1);
    assert_eq!(fs::read(place.path("tuned/config.json")).ok(), Some(b"old".into()));
}
