//! Unusual folders, against transformers: padding rows, tied pairs that differ or have only one
//! tensor in the file, scaled wavelengths, and settings of families that the golden runs lack.

use std::path::Path;

use hsdp::Mesh;
use hsdp_models::decoder::Recomputation;
use serde::Deserialize;

use crate::batches::{Batches, golden, odd_families};
use crate::run::{Numbers, Recipe, Run, decoder};

#[derive(Deserialize)]
struct Expected {
    losses: Vec<f64>,
    norms: Vec<f64>,
    before: f64,
    after: f64,
    parameters: Vec<String>,
}

fn run(folder: &Path, mesh: &str, microbatches: usize) -> Numbers {
    let model = folder.join("model");
    let mesh: Mesh = mesh.parse().expect("a mesh");
    let decoder = decoder(&model);
    let run = |decoder| Run {
        decoder,
        model: model.clone(),
        mesh,
        microbatches,
        steps: 6,
        recipe: Recipe::AdamW,
    };
    let batches = Batches::read(folder);
    let kept = run(decoder.clone()).numbers(&batches);
    if mesh.world_size() == 4 {
        assert_eq!(run(decoder.recomputing(Recomputation::Blocks)).numbers(&batches), kept);
    }
    kept
}

fn check(folder: &Path, mesh: &str, microbatches: usize) {
    let text = std::fs::read_to_string(folder.join("expected.json")).expect("there");
    let want: Expected = serde_json::from_str(&text).expect("numbers");
    let got = run(folder, mesh, microbatches);
    let folder = folder.display();
    let names: Vec<_> = got.first.keys().cloned().collect();
    let mut parameters = want.parameters;
    parameters.sort();
    assert_eq!(names, parameters, "{folder}");
    let within = |what: &str, got: &[f64], want: &[f64], relative: f64| {
        assert_eq!(got.len(), want.len());
        for (step, (got, want)) in got.iter().zip(want).enumerate() {
            let is_near = (got - want).abs() <= relative * want.abs();
            assert!(is_near, "{folder} on {mesh}: {what} of step {step}: {got}, not {want}");
        }
    };
    within("loss", &got.losses, &want.losses, 2e-5);
    within("norm", &got.norms, &want.norms, 1e-4);
    within("held-out loss", &got.held_out, &[want.before, want.after], 2e-5);
}

const MESHES: [(&str, usize); 4] = [("1x1", 2), ("1x2", 1), ("2x1", 1), ("2x2", 2)];

fn check_all(folder: &Path) {
    for (mesh, microbatches) in MESHES {
        check(folder, mesh, microbatches);
    }
}

#[test]
fn a_tied_pair_of_which_one_is_stored_is_one_parameter() {
    check_all(&golden("onlyhead"));
}

#[test]
fn a_tied_pair_that_differs_is_two_parameters() {
    check_all(&golden("untied"));
}

#[test]
fn both_names_of_the_kind_of_rope_are_read() {
    check_all(&golden("rope_both"));
}

#[test]
fn wavelengths_are_scaled() {
    check_all(&golden("rope_linear"));
}

#[test]
fn a_padding_row_gets_no_gradient() {
    check_all(&golden("pad"));
}

#[test]
fn a_padding_row_of_a_tied_pair_gets_that_of_the_head() {
    check_all(&golden("pad_tied"));
}

#[test]
fn a_padding_token_below_0_is_a_row_from_the_end() {
    check_all(&golden("pad_last"));
}

/// Biases, windows, caps, parts of heads, untied and tied pairs, bf16 in several files.
#[test]
fn settings_of_families_are_those_of_transformers() {
    for (folder, (mesh, microbatches)) in odd_families().iter().zip(MESHES.into_iter().cycle()) {
        check(folder, mesh, microbatches);
    }
}

#[test]
#[ignore = "a minute without optimization: .ci/run has it optimized"]
fn so_they_are_on_every_mesh() {
    odd_families().iter().for_each(|folder| check_all(folder));
}
