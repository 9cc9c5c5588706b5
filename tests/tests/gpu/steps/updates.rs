//! What updates a model: on the device, by `update_on_device`, and nowhere else.

use hsdp::{
    DeviceRun, Ema, Error, FullCopies, Gradients, ModelOptions, ModelSpec, NonFinite, Offload,
    Optimizer, Param, Placement, Sgd, SgdOptions, ShardedModel, StepOptions, Unit, UnitId, Update,
    World,
};
use hsdp_kernels::cuda::{CudaError, DeviceBuffer, PieceOfStep};
use hsdp_kernels::{MomentumKind, SgdStep};
use hsdp_sharding::DType;
use hsdp_tests::support::models::layer;
use hsdp_tests::support::slopes;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common, on_ranks};

use super::super::{device, device_buffers};
use super::training::spec;
use super::{DEVICE, PLACES, offloading, placed};

fn model(world: World, options: &ModelOptions) -> Result<ShardedModel, Error> {
    springs::model_of(world, &spec(), options)
}

/// A step in which one parameter gets no gradient, and all elements of the others this.
fn gradients(model: &mut ShardedModel, slope: f32) -> Result<Gradients, Error> {
    let mut step = model.begin_step(StepOptions::microbatches(1))?;
    let by_param = |param: &Param| (param.name != "first.bias").then_some(slope);
    slopes::microbatch_by(&mut step, &by_param)?;
    step.finish()
}

/// What one rank is told that updates by `act`.
fn refused(
    options: &ModelOptions,
    slope: f32,
    act: impl Fn(&mut ShardedModel, Gradients) -> Result<Update, Error>,
) -> String {
    let mut model = model(World::single(), options).expect("a model");
    let before = model.full_parameters().expect("parameters");
    let gradients = gradients(&mut model, slope).expect("gradients");
    let told = act(&mut model, gradients).expect_err("it is refused").to_string();
    assert_eq!(model.full_parameters().expect("parameters"), before, "nothing was changed");
    assert_eq!(model.committed_steps(), 0, "nothing was committed");
    told
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_model_on_a_device_is_not_updated_on_the_host() {
    let told = refused(&placed(DEVICE, [1, 1]), 1.0, |model, gradients| {
        model.update(gradients, |_| panic!("nothing lies on the host"))
    });
    let what = "the shards of this model are updated on a device: call `update_on_device`";
    assert_eq!(told, format!("optimizer step on rank 0, step 0: {what}"));
}

/// Also where there would be nothing to do.
#[test]
#[ignore = "needs a CUDA device"]
fn a_model_on_the_host_is_not_updated_on_a_device() {
    let options = ModelOptions { non_finite: NonFinite::Skip, ..placed(Placement::Host, [1, 1]) };
    for slope in [1.0, f32::NAN] {
        let told = refused(&options, slope, |model, gradients| {
            model.update_on_device(gradients, |_| panic!("nothing lies on a device"))
        });
        let what = "this model is updated on the host";
        assert_eq!(told, format!("optimizer step on rank 0, step 0: {what}"));
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn an_update_that_the_device_refuses_says_why() {
    let _pool = device_buffers::pool();
    let told = refused(&placed(DEVICE, [1, 1]), 1.0, |model, gradients| {
        model.update_on_device(gradients, |_| {
            DeviceBuffer::new(&device(), DType::F32, 1 << 45, "the moon").map(drop)
        })
    });
    let begins = "optimizer step on rank 0, step 0: CUDA device 0 is out of memory: cannot allocate \
                  140737488355328 bytes for the moon, ";
    assert!(told.starts_with(begins), "{told}");
}

/// Steps against the gradient, clipped, of what is trained and has one.
fn descend(mut run: DeviceRun<'_>, rate: f64) -> Result<(), CudaError> {
    let stream = run.stream;
    let piece = |piece: &hsdp::Piece| PieceOfStep { range: piece.shard_range(), state: 0, step: 1 };
    let pieces: Vec<PieceOfStep> = run.pieces.iter().map(piece).collect();
    let kind = MomentumKind::Classic;
    let (update, clip) = run.update();
    let step = SgdStep { learning_rate: rate, momentum: 0.0, kind, weight_decay: 0.0, clip };
    stream.sgd(update, &pieces, &step, None)
}

/// The norm of a gradient whose elements are all alike is the same whatever the order of its sum,
/// and so is what is clipped.
#[test]
#[ignore = "needs a CUDA device"]
fn an_optimizer_that_was_written_outside_updates_clipped_gradients_as_ours_does_on_the_host() {
    let [expected, found] = PLACES.map(|placement| {
        let options = placed(placement, [2, 2]);
        common(on_ranks(4, |world| {
            let mut model = model(world, &options)?;
            let mut sgd =
                Sgd::new(&model, SgdOptions { learning_rate: 0.5, ..SgdOptions::default() });
            let gradients = gradients(&mut model, 1.0)?.clip(2.0);
            assert!(gradients.clip_factor() < 1.0);
            if placement == Placement::Host {
                sgd.step(&mut model, gradients)?;
                return model.full_parameters();
            }
            let mut units: Vec<UnitId> = Vec::new();
            let update = model.update_on_device(gradients, |run| {
                units.push(run.unit);
                descend(run, 0.5)
            })?;
            assert_eq!((update, model.committed_steps()), (Update::Applied, 1));
            let order: Vec<UnitId> = model.plan().update_order().collect();
            assert_eq!(units, order, "in the order of updates");
            model.full_parameters()
        }))
    });
    assert_eq!(found, expected);
    let bias = spec().find("first.bias").expect("it is there");
    assert_eq!(found["first.bias"], springs::initial(&spec()[bias]), "it got no gradient");
}

#[test]
#[ignore = "needs a CUDA device"]
fn one_full_copy_for_all_ranks_is_refused_on_a_device() {
    let options = ModelOptions { full_copies: FullCopies::PerProcess, ..placed(DEVICE, [1, 1]) };
    let error = model(World::single(), &options).map(drop).expect_err("it is refused");
    assert!(matches!(error, Error::Options { .. }), "{error:?}");
    assert_eq!(error.to_string(), "FullCopies::PerProcess with a model that lies on a device");
}

/// One unit is frozen as a whole, and one parameter gets no gradient.
#[test]
#[ignore = "needs a CUDA device"]
fn an_average_has_the_same_bits_wherever_the_model_is_updated() {
    let still = Unit::new("still").param(Param::new("still.weight", [5, 9]).frozen());
    let spec =
        ModelSpec::new().unit(layer("first", [13, 7])).unit(still).unit(layer("wide", [90, 100]));
    let places =
        [Placement::Host, DEVICE, offloading(Offload::Optimizer), offloading(Offload::All)];
    let [on_host, others @ ..] = places.map(|placement| {
        common(on_ranks(4, |world| {
            let options = placed(placement, [2, 2]);
            let mut model = springs::model_of(world, &spec, &options)?;
            let mut sgd =
                Sgd::new(&model, SgdOptions { weight_decay: 0.3, ..SgdOptions::default() });
            let ema = Ema::new(&model, 0.9)?;
            for slope in [1.0, -2.0, 0.5] {
                let gradients = gradients(&mut model, slope)?;
                sgd.step(&mut model, gradients)?;
            }
            let averages = model.with_shards(&ema, |model| model.full_parameters())?;
            Ok([averages, model.full_parameters()?])
        }))
    });
    for other in others {
        assert_eq!(other, on_host);
    }
    assert_ne!(on_host[0], on_host[1]);
}

#[test]
#[ignore = "needs a CUDA device"]
fn an_average_on_a_device_is_refused_where_a_unit_is_frozen_in_part() {
    let model = model(World::single(), &placed(DEVICE, [1, 1])).expect("a model");
    let told = Ema::new(&model, 0.9).map(drop).expect_err("it is refused").to_string();
    assert!(
        told.contains("parameter `mixed.table` is frozen, and others of unit `mixed` are not"),
        "{told}"
    );
}
