//! Repeats golden runs on a mesh, and compares.
//!
//! ```text
//! cargo run --release -p hsdp-tests --bin golden -- batchnorm FOLDER --mesh 2x2
//! ```

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use hsdp::Mesh;
use hsdp_tests::golden::batch_norm::{Activations, GoldenRun};
use hsdp_train::{Failure, command_line, print, threads};

/// Repeats a training by PyTorch on a mesh, and exits with 1 if a number differs by more than
/// rounding explains
#[derive(Debug, Parser)]
#[command(name = "golden", version)]
enum Golden {
    /// Trains a convolutional net with batch norm: losses and held-out losses within 2e-5, norms
    /// of gradients within 1e-4, running statistics within 1e-5
    #[command(name = "batchnorm")]
    BatchNorm(Options),
}

#[derive(Debug, clap::Args)]
struct Options {
    /// Folder with init.safetensors, batches.safetensors, final.safetensors and expected.json
    folder: PathBuf,

    /// Mesh of replicas x shards, whose ranks are threads
    #[arg(long, value_name = "RxS", default_value = "1x1")]
    mesh: Mesh,

    /// Run the forward of each unit again in the backward
    #[arg(long)]
    recompute: bool,
}

fn main() -> ExitCode {
    hsdp_train::program("golden", || {
        let Golden::BatchNorm(options) = command_line::read()?;
        run(&options)
    })
}

fn run(options: &Options) -> Result<ExitCode, Failure> {
    let Options { folder, mesh, recompute } = options;
    threads::check(mesh.world_size(), threads::IN_EXAMPLES)
        .map_err(|problem| Failure::Input(format!("mesh {mesh} has {problem}")))?;
    let golden = GoldenRun::read(folder)?;
    let activations = if *recompute { Activations::Recomputed } else { Activations::Kept };
    let mut differences = golden.differences(&golden.train(*mesh, activations)?)?;
    differences.sort_by(|a, b| a.of_bound().total_cmp(&b.of_bound()));
    for difference in &differences {
        print(difference)?;
    }
    let agrees = differences.iter().all(|difference| difference.of_bound() <= 1.0);
    Ok(if agrees { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
