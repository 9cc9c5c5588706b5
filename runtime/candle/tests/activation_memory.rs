//! Recomputed units keep their outputs only, and evaluations keep nothing, as the allocator counts.

#[path = "graph/common.rs"]
mod common;

use candle_core::{Result, Tensor};
use hsdp::memory::{self, Category, CountingAllocator};
use hsdp::{Mesh, Rank, StepOptions, World};
use hsdp_candle::{Parameters, Pass, UnitsExt};

use common::{input, layer, layers, sharded};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

const ROWS: usize = 1024;
const WIDTH: usize = 16;
/// Bytes of one activation, in f32. The parameters of all layers have an eighth of them.
const ACTIVATION: u64 = 4 * (ROWS * WIDTH) as u64;

/// A layer that makes eleven activations, and its output once more.
fn deep(p: &dyn Parameters, index: usize, x: &Tensor) -> Result<Tensor> {
    let mut x = layer(p, index, x)?;
    for _ in 0..8 {
        x = x.sin()?;
    }
    Ok(x)
}

/// Numbers of activations of a model.
#[derive(Clone, Copy, Debug, Default)]
struct Activations {
    /// Most that are alive in the forward.
    forward: f64,
    /// Alive between forward and backward.
    between: f64,
    /// Most that are alive in the backward.
    backward: f64,
}

/// Measures the activations of a number of layers.
fn activations(
    count: usize,
    run: impl Fn(&Pass<'_>, usize, &Tensor) -> Result<Tensor>,
) -> Activations {
    let mesh = Mesh::new(1, 1).expect("one rank");
    let mut model = sharded(World::single(), layers(count, WIDTH), mesh);
    let mut step = model.begin_step(StepOptions::microbatches(2)).expect("a step");
    let mut measured = Activations::default();
    for _ in 0..2 {
        // The first microbatch makes the workspaces that stay.
        let pass = Pass::new(step.microbatch().expect("a microbatch")).expect("a pass");
        let usage = || memory::usage(Rank::new(0), Category::Full);
        let before = usage().live;
        let _scope = memory::scope(Category::Full);
        memory::reset_peaks();
        let mut x = input(0, ROWS, WIDTH);
        for index in 0..count {
            x = run(&pass, index, &x).expect("a forward");
        }
        let loss = x.sqr().and_then(|x| x.mean_all()).expect("a loss");
        drop(x);
        let in_activations = |bytes: u64| bytes as f64 / ACTIVATION as f64;
        measured.forward = in_activations((usage().peak - before).get());
        measured.between = in_activations((usage().live - before).get());
        memory::reset_peaks();
        pass.backward(&loss, 1).expect("a backward");
        measured.backward = in_activations((usage().peak - before).get());
    }
    measured
}

fn kept(pass: &Pass<'_>, index: usize, x: &Tensor) -> Result<Tensor> {
    pass.unit(&format!("layer.{index}"), x, |p, x| deep(p, index, x))
}

fn recomputed(pass: &Pass<'_>, index: usize, x: &Tensor) -> Result<Tensor> {
    let forward = move |p: &dyn Parameters, x: &Tensor| deep(p, index, x);
    pass.recomputed(&format!("layer.{index}"), x, forward)
}

/// One test, because the counters belong to the whole process.
#[test]
fn activations_are_kept_as_long_as_a_backward_needs_them() {
    recomputed_units_keep_their_outputs_only();
    evaluations_keep_no_activations();
}

fn evaluations_keep_no_activations() {
    let mesh = Mesh::new(1, 1).expect("one rank");
    let mut model = sharded(World::single(), layers(16, WIDTH), mesh);
    let mut evaluation = model.evaluation().expect("between steps");
    for _ in 0..2 {
        // The first batch makes the workspaces that stay.
        let pass = Pass::new(evaluation.batch().expect("a batch")).expect("a pass");
        let usage = || memory::usage(Rank::new(0), Category::Full);
        let before = usage().live;
        let _scope = memory::scope(Category::Full);
        memory::reset_peaks();
        let mut x = input(0, ROWS, WIDTH);
        for index in 0..16 {
            x = kept(&pass, index, &x).expect("a forward");
        }
        let peak = (usage().peak - before).get() as f64 / ACTIVATION as f64;
        // The input of a layer, and the input and output of one operation.
        assert!((2.0..5.0).contains(&peak), "{peak} activations");
        drop(x);
        pass.finish().expect("the end");
    }
    evaluation.finish().expect("the end of the evaluation");
}

fn recomputed_units_keep_their_outputs_only() {
    for count in [4, 16] {
        // The input, an output of each layer, and the squares of the loss.
        let outputs = (count + 2) as f64;
        let layers = count as f64;
        let Activations { forward, between, backward } = activations(count, recomputed);
        // Small tensors and the graph have less than a tenth of an activation a layer.
        let most = outputs + layers / 10.0;
        assert!((outputs..most).contains(&between), "{count}: {between}, expected {outputs}");
        // One layer at a time has its eleven tensors, while its first run lasts.
        assert!(forward < most + 12.0, "{count}: {forward}, expected {outputs} and 12");
        // The backward has one layer's tensors more, and candle's gradients, however many layers
        // there are.
        assert!(backward < most + 29.0, "{count}: {backward}, expected {outputs} and 29");
        let Activations { between, .. } = activations(count, kept);
        assert!(between > 12.0 * layers, "{count}: {between}");
    }
}
