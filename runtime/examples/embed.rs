//! hsdp without an autograd: two layers, gradients written by hand, on a 2 x 2 mesh of threads.
//! Read this first to train with gradients of your own: `cargo run --release -p hsdp --example embed`
#![expect(clippy::cast_possible_truncation, reason = "an f32 example")]

use hsdp::prelude::*;
use std::io::Write as _;

const INPUTS: usize = 4;
const HIDDEN: usize = 16;
const UNITS: [UnitId; 2] = [UnitId::new(0), UnitId::new(1)]; // in declared order

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let ranks = hsdp::launch(4, WorldOptions::default(), train);
    let ranks = ranks.into_iter().collect::<Result<Vec<_>, _>>()?;
    let losses = &ranks[0];
    assert!(ranks.iter().all(|others| others == losses), "all ranks see the same losses");
    for (number, loss) in losses.iter().enumerate().step_by(50) {
        writeln!(std::io::stdout(), "step {number:3}  loss {loss:.4}")?;
    }
    assert!(losses.last().is_some_and(|loss| *loss < 0.05), "it learns");
    Ok(())
}

fn train(world: World) -> Result<Vec<f64>, hsdp::Error> {
    // 1. Declare the parameters in units: hsdp gathers and reduces a unit as a whole.
    let spec = ModelSpec::new()
        .unit(Unit::new("hidden").param(Param::new("w1", [HIDDEN, INPUTS])))
        .unit(Unit::new("output").param(Param::new("w2", [HIDDEN])));
    let rank = world.rank().index();

    // 2. Shard them over a mesh, replicate x shard: each rank keeps its shard of the values that `init` returns.
    let init = |p: &Param| (0..p.numel()).map(|at| 0.7 * noise(at * 7 + p.numel())).collect();
    let mut model = ShardedModel::new(world, spec, ModelOptions::on(Mesh::new(2, 2)?), init)?;
    let mut adamw = AdamW::new(&model, AdamWOptions { learning_rate: 0.02, ..Default::default() });
    let mut losses = Vec::new();
    for number in 0..300 {
        // 3. A step: any number of microbatches, each a forward and a backward.
        let mut step = model.begin_step(StepOptions::microbatches(2))?;
        for microbatch in 0..2 {
            let (x, want) = batch(number * 8 + microbatch * 4 + rank);
            train_on(&x, &want, step.microbatch()?)?;
        }
        // One all-reduce, one division, all ranks agree; then each updates its own shard.
        let gradients = step.finish()?;
        losses.push(gradients.loss());
        adamw.step(&mut model, gradients.clip(1.0))?;
    }
    model.end_run().map(|()| losses) // on all ranks, or an error on all
}

/// One microbatch: forward, loss, backward.
fn train_on(x: &[f32], want: &[f32], mut pass: Pass<'_>) -> Result<(), hsdp::Error> {
    let [hidden, output] = UNITS;
    // 4. Forward. hsdp frees a gathered unit when you drop it.
    let w1 = pass.unshard(hidden)?;
    let hidden_of = |x| rows(&w1, INPUTS).map(move |w| dot(w, x).max(0.0));
    let active: Vec<f32> = x.chunks(INPUTS).flat_map(hidden_of).collect();
    drop(w1);
    let w2 = pass.unshard(output)?;
    let outputs = active.chunks(HIDDEN).flat_map(|h| rows(&w2, HIDDEN).map(|w| dot(w, h)));
    let miss: Vec<f32> = outputs.zip(want).map(|(output, want)| output - want).collect();
    drop(w2);

    // 5. The loss is a sum and the number of items in it. The backward starts from the seed.
    let sum = LossSum::new(f64::from(dot(&miss, &miss)), miss.len() as u64);
    let seed = pass.loss(sum)?.value() as f32;

    // 6. Backward, last unit first: hand over each unit's gradients as soon as they are complete.
    let w2 = pass.unshard(output)?;
    let back: Vec<f32> = miss.iter().map(|miss| 2.0 * miss * seed).collect();
    pass.reduce(output, UnitGradients::of([outer(&back, 1, &active, HIDDEN)]))?;
    let spread = back.iter().flat_map(|back| rows(&w2, 1).map(move |w| back * w[0]));
    let gate = |(spread, act): (f32, &f32)| if *act > 0.0 { spread } else { 0.0 };
    let back: Vec<f32> = spread.zip(&active).map(gate).collect();
    pass.reduce(hidden, UnitGradients::of([outer(&back, HIDDEN, x, INPUTS)]))?;
    pass.finish()
}

fn rows(full: &Full, width: usize) -> std::slice::Chunks<'_, f32> {
    full.as_f32(0).expect("the model computes in f32").chunks(width)
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The sum over the batch of (each row of `a`, `n` wide) times (the same row of `b`, `m` wide), transposed.
fn outer(a: &[f32], n: usize, b: &[f32], m: usize) -> Vec<f32> {
    let entry = |i: usize, j: usize| a.chunks(n).zip(b.chunks(m)).map(|(a, b)| a[i] * b[j]).sum();
    (0..n * m).map(|at| entry(at / m, at % m)).collect()
}

fn batch(number: usize) -> (Vec<f32>, Vec<f32>) {
    let x: Vec<f32> = (0..8 * INPUTS).map(|at| noise(number * 1000 + at)).collect();
    let want = x.chunks(INPUTS).map(|x| (x[0] - x[1]).abs() + x[2] * 0.5).collect();
    (x, want)
}

/// Numbers between -1 and 1 that look random and are the same everywhere.
fn noise(seed: usize) -> f32 {
    ((seed as f64 * 12.9898).sin() * 43758.5453).fract() as f32
}
