//! One full copy for all ranks of a process: the ranks read and train the same bits as with a copy
//! each.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use hsdp::{
    AdamW, AdamWOptions, DType, Error, FullCopies, HostBuffer, LossSum, ModelOptions, Optimizer,
    Precision, ShardedModel, StepOptions, Unused, World,
};
use hsdp_tests::support::models::{keeping_the_second, partly_frozen, three_units, unit};
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common, mesh, on_ranks};

const MESHES: [(usize, usize); 6] = [(1, 1), (1, 4), (4, 1), (2, 2), (2, 3), (3, 2)];

/// Three steps of two microbatches with AdamW: the parameters of all ranks, which are the same.
fn trained(spec: &hsdp::ModelSpec, options: &ModelOptions) -> BTreeMap<String, Vec<f32>> {
    common(on_ranks(options.mesh.world_size(), |world| {
        let mut model = springs::model_of(world, spec, options)?;
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        for _ in 0..3 {
            let gradients = springs::gradients(&mut model, 2)?;
            adamw.step(&mut model, gradients)?;
        }
        model.full_parameters()
    }))
}

#[test]
fn training_is_the_same_bit_for_bit() {
    for (replicate, shard) in MESHES {
        for (parameters, spec) in [
            (DType::F32, three_units()),
            (DType::BF16, keeping_the_second()),
            (DType::F16, partly_frozen()),
        ] {
            let precision = Precision { parameters, ..Precision::default() };
            let own = ModelOptions { precision, ..ModelOptions::on(mesh(replicate, shard)) };
            let shared = ModelOptions { full_copies: FullCopies::PerProcess, ..own.clone() };
            assert_eq!(
                trained(&spec, &shared),
                trained(&spec, &own),
                "{replicate}x{shard}, {parameters}"
            );
        }
    }
}

fn model(world: World) -> Result<ShardedModel, Error> {
    let full_copies = FullCopies::PerProcess;
    let unused = Unused::Zeros;
    let options = ModelOptions { full_copies, unused, ..ModelOptions::on(mesh(2, 2)) };
    springs::model(world, &options)
}

#[test]
fn all_ranks_read_the_same_elements_at_the_same_place() {
    let places = on_ranks(4, |world| {
        let mut model = model(world)?;
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        let mut pass = step.microbatch()?;
        let full = pass.unshard(unit(0))?;
        let place = full.as_f32(0).expect("f32").as_ptr().addr();
        let _ = pass.loss(LossSum::new(0.0, 1))?;
        pass.finish()?;
        let _ = step.finish()?;
        drop(full);
        Ok(place)
    });
    common(places);
}

#[test]
fn what_is_taken_out_of_a_shared_copy_is_a_copy() {
    on_ranks(4, |world| {
        let mut model = model(world)?;
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        let mut pass = step.microbatch()?;
        let mut full = pass.unshard(unit(0))?;
        let before = full.as_f32(0).expect("f32").to_vec();
        let mut taken = full.take(0).expect("there is one");
        if let hsdp_kernels::ValuesMut::F32(values) = taken.values_mut() {
            values.fill(f32::NAN);
        }
        assert_eq!(full.as_f32(0).expect("f32"), before);
        full.put_back(0, taken);
        assert_eq!(full.as_f32(0).expect("f32"), before);
        let _ = pass.loss(LossSum::new(0.0, 1))?;
        pass.finish()?;
        step.finish().map(drop)
    });
}

#[test]
fn a_buffer_of_another_dtype_or_length_is_not_taken_back() {
    for full_copies in [FullCopies::PerRank, FullCopies::PerProcess] {
        on_ranks(1, |world| {
            let options = ModelOptions { full_copies, ..ModelOptions::on(mesh(1, 1)) };
            let mut model = springs::model(world, &options)?;
            let mut step = model.begin_step(StepOptions::microbatches(1))?;
            let mut pass = step.microbatch()?;
            let mut full = pass.unshard(unit(0))?;
            let len = full.values(0).len();
            for (dtype, len) in [(DType::BF16, len), (DType::F32, len + 1)] {
                let other = HostBuffer::zeros(dtype, len).expect("a small one");
                let put = AssertUnwindSafe(|| full.put_back(0, other));
                catch_unwind(put).expect_err("it does not fit");
            }
            Ok(())
        });
    }
}

#[test]
fn a_world_whose_ranks_share_no_memory_is_refused() {
    let world = World::counting(4, hsdp::Rank::new(1)).expect("a rank of four");
    let error = model(world).expect_err("there is nobody to share with").to_string();
    assert!(error.contains("not threads of one process"), "{error}");
}
