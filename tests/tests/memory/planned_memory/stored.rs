//! Frozen parameters that are stored in the compute dtype alone: no f32 masters, at no time.

use std::sync::Arc;

use hsdp::checkpoint::{CheckpointOptions, Checkpoints, Content, Import};
use hsdp::memory::{self, Category, Usage};
use hsdp::{
    AdamW, AdamWOptions, ByteCount, DType, Mesh, ModelOptions, ModelSpec, Param, Precision,
    ShardedModel, StateOver, Unit,
};
use hsdp_checkpoint::{Disk, Store, Weights, export};
use hsdp_tests::support::models::partly_frozen;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{mesh, on_ranks};
use serde_json::Value;

use crate::alone;
use crate::planned_memory::{Compared, places, uneven_units};

#[test]
fn peaks_are_as_planned_with_frozen_parameters_that_are_stored_in_the_compute_dtype() {
    let mut compared = Compared::default();
    for dtype in [DType::BF16, DType::F16] {
        for (on, state) in places([(1, 1), (1, 4), (2, 2), (2, 3), (4, 1)]) {
            let name = format!("stored in {dtype}, {on}, state over {state}");
            compared.add(&name, &stored_units(dtype), &options(on, state, dtype));
        }
    }
    println!("{}", compared.table());
}

fn options(on: Mesh, state: StateOver, dtype: DType) -> ModelOptions {
    let precision = Precision::compute_in(dtype);
    ModelOptions { precision, state, ..ModelOptions::on(on) }
}

/// Their 2 bytes an element are there, and no f32 of more than a unit at any time: also not where
/// the model is read.
#[test]
fn stored_parameters_take_two_bytes_also_while_they_are_made_imported_saved_and_loaded() {
    for (on, state) in places([(1, 1), (2, 2), (1, 3), (4, 1)]) {
        let _turn = alone();
        let folder = tempfile::tempdir().expect("a folder");
        let store = folder.path().join("store");
        let exported = folder.path().join("model");
        let options = options(on, state, DType::BF16);
        let spec = stored_units(DType::BF16);
        let ranks = options.mesh.world_size();
        memory::reset_peaks();
        let made = on_ranks(ranks, |world| {
            let model = springs::model_of(world, &spec, &options)?;
            let adamw = AdamW::new(&model, AdamWOptions::default());
            let with = CheckpointOptions::default();
            Checkpoints::open(&model, &store, with)?.save(&model, &adamw, &Value::Null)?;
            Ok(held(&model))
        });
        let generation = Store::new(&store, Arc::new(Disk)).latest().expect("read");
        let generation = generation.expect("it was saved");
        export(&generation, &Disk, &exported, Weights::Trained, u64::MAX).expect("exported");
        memory::reset_peaks();
        let imported = on_ranks(ranks, |world| {
            let from = Import::of(&exported);
            let model = ShardedModel::import(world, spec.clone(), options.clone(), &from)?.model;
            Ok(held(&model))
        });
        for [planned, live, peak] in made.into_iter().chain(imported) {
            assert_eq!((live, peak), (planned, planned), "{on}, state over {state}");
        }
        // A copy of all parameters is there until all ranks have read all.
        let loaded = on_ranks(ranks, |world| {
            let mut model = springs::model_of(world, &spec, &options)?;
            let mut adamw = AdamW::new(&model, AdamWOptions::default());
            let with = CheckpointOptions::default();
            Checkpoints::open(&model, &store, with)?.load(&mut model, &mut adamw, 0)?;
            Ok((held(&model), memory::usage(model.rank(), Category::Load), read(&model)))
        });
        for ([planned, live, peak], load, read) in loaded {
            assert_eq!((live, peak), (planned, planned), "{on}, state over {state}");
            let copy = Usage { live: ByteCount::ZERO, peak: read };
            assert_eq!(load, copy, "{on}, state over {state}");
        }
    }
}

/// Frozen parameters stay where they are: there is no second copy of them, also not for a moment.
#[test]
fn a_load_of_the_trainable_parameters_copies_no_frozen_one() {
    for dtype in [DType::F32, DType::BF16] {
        for state in StateOver::ALL {
            let _turn = alone();
            let folder = tempfile::tempdir().expect("a folder");
            let options = options(mesh(2, 2), state, dtype);
            let spec = if dtype == DType::F32 { partly_frozen() } else { stored_units(dtype) };
            memory::reset_peaks();
            let loaded = on_ranks(4, |world| {
                let mut model = springs::model_of(world, &spec, &options)?;
                let mut adamw = AdamW::new(&model, AdamWOptions::default());
                let content = Content::Trainable;
                let with = CheckpointOptions { content, ..CheckpointOptions::default() };
                let mut checkpoints = Checkpoints::open(&model, folder.path(), with)?;
                checkpoints.save(&model, &adamw, &Value::Null)?;
                checkpoints.load(&mut model, &mut adamw, 0)?;
                Ok(held(&model))
            });
            for [planned, live, peak] in loaded {
                assert_eq!((live, peak), (planned, planned), "{dtype}, state over {state}");
            }
        }
    }
}

/// Returns the bytes that a rank reads from a checkpoint of all parameters: masters of whole
/// shards, also if it keeps those of its slices alone, and stored parameters.
fn read(model: &ShardedModel) -> ByteCount {
    let layouts = model.plan().layouts().iter();
    let of = |len: usize, size: usize| ByteCount((len * size) as u64);
    let masters = layouts.clone().map(|layout| of(layout.master_len(), 4));
    let stored = layouts.filter(|layout| layout.stored().is_some());
    let stored = stored.map(|layout| of(layout.shard_len(), 2));
    masters.chain(stored).sum()
}

/// Of f32 masters and of gather inputs: what is planned, what is live, and the peak.
fn held(model: &ShardedModel) -> [[ByteCount; 2]; 3] {
    let gather_input = model.plan().memory().gather_input;
    let usage = [Category::Shard, Category::GatherInput].map(|it| memory::usage(model.rank(), it));
    [
        [model.plan().masters(model.rank()), gather_input],
        usage.map(|usage| usage.live),
        usage.map(|usage| usage.peak),
    ]
}

/// A large frozen base, part of it beside trained parameters.
fn stored_units(dtype: DType) -> ModelSpec {
    let base = |index: usize, unit: &Unit| {
        let weight = Param::new(format!("base.{index}"), [50, 70 + index]).frozen();
        unit.clone().param(weight.stored_in(dtype))
    };
    let mixed = uneven_units();
    let mixed = mixed.units().iter().enumerate().map(|(index, unit)| base(index, unit));
    let still = Unit::new("still").param(Param::new("table", [333]).frozen().stored_in(dtype));
    mixed.fold(ModelSpec::new(), ModelSpec::unit).unit(still)
}
