//! A folder for runs of the program.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use candle_core::{Device, Tensor, safetensors};
use hsdp_train::testing::refusal;
use serde_json::Value;
use tempfile::TempDir;

use crate::{example, stdout};

/// The options of most runs.
pub(crate) const TUNE: &str = "--model {model} --batches {batches.safetensors}";

/// A golden folder.
pub(crate) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden_llama").join(name)
}

/// A folder for the files of a test, with a copy of a golden model and its batches.
pub(crate) struct Place(TempDir);

impl Place {
    pub(crate) fn new() -> Self {
        Self::of("plain")
    }

    /// Copies another golden model and its batches.
    pub(crate) fn of(name: &str) -> Self {
        Self::copy(&golden(name))
    }

    /// Copies the model of a golden run and its batches.
    pub(crate) fn copy(golden: &Path) -> Self {
        let place = Self(TempDir::new().expect("a folder"));
        fs::create_dir(place.path("model")).expect("a folder");
        for file in fs::read_dir(golden.join("model")).expect("a folder") {
            let file = file.expect("a file").path();
            let copy = place.path("model").join(file.file_name().expect("a name"));
            fs::copy(&file, copy).expect("copied");
        }
        let batches = "batches.safetensors";
        fs::copy(golden.join(batches), place.path(batches)).expect("copied");
        place
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Returns the command that runs the program. Names in braces are paths in the folder.
    pub(crate) fn command(&self, arguments: &str) -> Command {
        let path = |word: &str| match word.strip_prefix('{').and_then(|it| it.strip_suffix('}')) {
            Some(name) => self.path(name).display().to_string(),
            None => word.to_owned(),
        };
        let mut command = example("finetune");
        command.args(arguments.split_whitespace().map(path));
        command
    }

    pub(crate) fn run(&self, arguments: &str) -> Output {
        self.command(arguments).output().expect("the program starts")
    }

    pub(crate) fn trained(&self, arguments: &str) -> String {
        stdout(&self.run(arguments))
    }

    /// Returns the line of a refusal.
    pub(crate) fn refused(&self, arguments: &str) -> String {
        let said = refusal(&mut self.command(arguments));
        assert!(said.starts_with("finetune: "), "{arguments}: {said}");
        said
    }

    pub(crate) fn json(&self, name: &str) -> Value {
        let text = fs::read_to_string(self.path(name)).expect("a file");
        serde_json::from_str(&text).expect("JSON")
    }

    pub(crate) fn losses(&self, out: &str) -> Vec<f64> {
        self.of_steps(out, "loss")
    }

    /// A number of each step.
    pub(crate) fn of_steps(&self, out: &str, name: &str) -> Vec<f64> {
        let text = fs::read_to_string(self.path(out).join("metrics.jsonl")).expect("metrics");
        let line = |line: &str| serde_json::from_str::<Value>(line).expect("JSON");
        text.lines().map(|it| line(it)[name].as_f64().expect("a number")).collect()
    }

    /// Changes the file of batches.
    pub(crate) fn rewrite(&self, file: &str, change: impl FnOnce(&mut HashMap<String, Tensor>)) {
        let path = self.path(file);
        let mut tensors = safetensors::load(&path, &Device::Cpu).expect("tensors");
        change(&mut tensors);
        safetensors::save(&tensors, &path).expect("written");
    }

    pub(crate) fn reconfigure(&self, field: &str, value: Value) {
        let mut config = self.json("model/config.json");
        config[field] = value;
        fs::write(self.path("model/config.json"), config.to_string()).expect("written");
    }
}
