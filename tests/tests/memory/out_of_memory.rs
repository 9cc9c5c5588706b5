//! A rank that has no memory for a buffer: it and all others end the step, and go on with the next
//! when there is some.

use std::sync::Arc;

use hsdp::checkpoint::{CheckpointOptions, Checkpoints, Import};
use hsdp::collective::{Collective, Copies};
use hsdp::memory::{self, Category};
use hsdp::{
    Accumulation, Ema, Error, ModelOptions, Optimizer, Rank, Sgd, SgdOptions, ShardedModel,
};
use hsdp_checkpoint::{Disk, Store, Weights, export};
use hsdp_comm::{Channel, Tag};
use hsdp_sharding::ByteCount;
use hsdp_tests::support::models::three_units;
use hsdp_tests::support::slopes;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common, mesh, on_ranks};
use serde_json::Value;

use crate::alone;

/// Trains two steps; in the first, and in no other, rank 1 may hold no more than nothing in
/// `category`. Returns the error of each rank.
fn trained(category: Category, options: &ModelOptions) -> Vec<String> {
    let outcomes = on_ranks(4, |world| {
        let rank = world.rank();
        let mut model = springs::model(world, options)?;
        let mut sgd = Sgd::new(&model, SgdOptions::default());
        let nothing = (rank == Rank::new(1)).then_some(ByteCount(0));
        memory::set_budget(rank, category, nothing);
        let told = step(&mut model, &mut sgd).expect_err("rank 1 has no memory");
        assert!(!told.is_fatal(), "{told}");
        memory::set_budget(rank, category, None);
        step(&mut model, &mut sgd)?;
        Ok((told.to_string(), model.full_parameters()?))
    });
    let (told, parameters): (Vec<_>, Vec<_>) = outcomes.into_iter().unzip();
    let untouched = common(on_ranks(4, |world| {
        let mut model = springs::model(world, options)?;
        let mut sgd = Sgd::new(&model, SgdOptions::default());
        step(&mut model, &mut sgd)?;
        model.full_parameters()
    }));
    assert_eq!(common(parameters), untouched, "the failed step left no trace");
    told
}

fn step(model: &mut ShardedModel, sgd: &mut Sgd) -> Result<(), Error> {
    let gradients = springs::gradients(model, 1)?;
    sgd.step(model, gradients).map(drop)
}

fn assert_told(told: &[String], expected: &str) {
    for (rank, told) in told.iter().enumerate() {
        match rank {
            1 => assert_eq!(told, expected),
            _ => assert_eq!(told, &format!("step 0 aborted by rank 1: {expected}")),
        }
    }
}

#[test]
fn there_is_no_memory_for_a_gather() {
    let _turn = alone();
    let told = trained(Category::Full, &ModelOptions::on(mesh(2, 2)));
    assert_told(
        &told,
        "gather of unit first on rank 1, step 0: out of memory: cannot allocate 364 bytes",
    );
}

#[test]
fn there_is_no_memory_for_a_partial() {
    let _turn = alone();
    let told = trained(Category::Partial, &ModelOptions::on(mesh(2, 2)));
    assert_told(
        &told,
        "reduction of unit third on rank 1, step 0: out of memory: cannot allocate 256 bytes",
    );
}

#[test]
fn there_is_no_memory_for_an_unsharded_gradient() {
    let _turn = alone();
    let local = Accumulation::Local;
    let told = trained(
        Category::GradFull,
        &ModelOptions { accumulation: local, ..ModelOptions::on(mesh(2, 2)) },
    );
    assert_told(
        &told,
        "accumulation of unit third on rank 1, step 0: out of memory: cannot allocate 372 bytes",
    );
}

/// Makes a call in which rank 1 gets no memory in `category`, and returns the error of this rank.
fn without<T>(rank: Rank, category: Category, call: impl FnOnce() -> Result<T, Error>) -> String {
    memory::set_budget(rank, category, (rank == Rank::new(1)).then_some(ByteCount(0)));
    let told = call().map(drop).expect_err("rank 1 has no memory").to_string();
    memory::set_budget(rank, category, None);
    told
}

#[test]
fn there_is_no_memory_for_the_state_of_a_checkpoint() {
    let _turn = alone();
    let folder = tempfile::tempdir().expect("a folder");
    for category in [Category::Load, Category::Optimizer] {
        let told = on_ranks(4, |world| {
            let rank = world.rank();
            let mut model = springs::model(world, &ModelOptions::on(mesh(2, 2)))?;
            let mut sgd = Sgd::new(&model, SgdOptions { momentum: 0.9, ..SgdOptions::default() });
            let mut checkpoints =
                Checkpoints::open(&model, folder.path(), CheckpointOptions::default())?;
            if category == Category::Load {
                let gradients = slopes::gradients(&mut model, 1.0)?;
                sgd.step(&mut model, gradients)?;
                checkpoints.save(&model, &sgd, &Value::Null)?;
            }
            let told = without(rank, category, || checkpoints.load_latest(&mut model, &mut sgd));
            assert!(checkpoints.load_latest(&mut model, &mut sgd)?.is_some());
            Ok(told)
        });
        let expected = match category {
            Category::Load => "out of memory",
            _ => "loading of unit first on rank 1, step 1: out of memory",
        };
        let expected =
            format!("loading at step 1, on rank 1: {expected}: cannot allocate 256 bytes");
        assert_eq!(common(told), expected);
    }
}

#[test]
fn there_is_no_memory_for_an_average() {
    let _turn = alone();
    let told = on_ranks(2, |world| {
        let rank = world.rank();
        let mut model = springs::model(world, &ModelOptions::on(mesh(1, 2)))?;
        let mut sgd = Sgd::new(&model, SgdOptions::default());
        for _ in 0..3 {
            step(&mut model, &mut sgd)?;
        }
        memory::set_budget(rank, Category::Optimizer, Some(ByteCount(0)));
        let told = Ema::new(&model, 0.9).expect_err("there is no memory");
        memory::set_budget(rank, Category::Optimizer, None);
        Ema::new(&model, 0.9).map(|_| told.to_string())
    });
    let expected = |rank| {
        format!(
            "Ema::new of unit first on rank {rank}, step 3: out of memory: cannot allocate 256 bytes"
        )
    };
    assert_eq!(told, [0, 1].map(expected));
}

#[test]
fn there_is_no_memory_for_an_imported_model() {
    let _turn = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let [store, from] = ["store", "model"].map(|name| folder.path().join(name));
    on_ranks(1, |world| {
        let model = springs::model(world, &ModelOptions::on(mesh(1, 1)))?;
        let sgd = Sgd::new(&model, SgdOptions::default());
        let mut checkpoints = Checkpoints::open(&model, &store, CheckpointOptions::default())?;
        checkpoints.save(&model, &sgd, &Value::Null).map(drop)
    });
    let generation = Store::new(&store, Arc::new(Disk)).latest().expect("read").expect("there");
    export(&generation, &Disk, &from, Weights::Trained, u64::MAX).expect("exported");
    let told = on_ranks(4, |world| {
        let rank = world.rank();
        let options = ModelOptions::on(mesh(2, 2));
        let import = || {
            let import = Import::of(&from);
            ShardedModel::import(world.clone(), three_units(), options.clone(), &import)
        };
        let told = without(rank, Category::Shard, import);
        import().map(|_| told)
    });
    assert_eq!(
        common(told),
        "importing at step 0, on rank 1: out of memory: cannot allocate 256 bytes"
    );
}

/// The zeros of a member that has no part in the gradient.
#[test]
fn there_is_no_memory_for_a_cotangent() {
    const ELEMENTS: usize = 1 << 20;
    let _turn = alone();
    let told = on_ranks(2, |world| {
        let rank = world.rank();
        let group = world.world_group(Channel::User);
        // Its gradient is not communicated: a thread that waits for the first time inside of the
        // scope would be charged for the table of waiting threads, which stays.
        let collective = Collective::Broadcast { root: 0, output: Copies::Invariant };
        let (output, backward) =
            collective.forward(&group, Tag::default(), vec![1_f32; ELEMENTS])?;
        let _scope = memory::scope(Category::Full);
        memory::set_budget(rank, Category::Full, Some(ByteCount(1 << 20)));
        let told = backward.gradient(output).map(drop);
        memory::set_budget(rank, Category::Full, None);
        Ok(told.map_err(|error| error.to_string()))
    });
    let expected = Err("out of memory: cannot allocate 4194304 bytes".to_owned());
    assert_eq!(told, [Ok(()), expected]);
}
