//! A model that lies on a device goes on from a checkpoint of one on the host, and the other way
//! round.

use std::path::Path;

use hsdp::checkpoint::{CheckpointOptions, Checkpointed, Checkpoints, Content};
use hsdp::{
    AdamW, AdamWOptions, Error, MomentumKind, Offload, Optimizer, Param, Placement, Sgd,
    SgdOptions, ShardedModel,
};
use hsdp_sharding::Role;
use hsdp_tests::support::models::partly_frozen;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common, on_ranks};

use super::{DEVICE, offloading, placed};

/// Two steps.
fn train(model: &mut ShardedModel, optimizer: &mut impl Optimizer) -> Result<(), Error> {
    for _ in 0..2 {
        let gradients = springs::gradients(model, 1)?;
        optimizer.step(model, gradients)?;
    }
    Ok(())
}

/// Beginning of a run.
#[derive(Clone, Copy, Debug)]
enum Begin {
    /// Two steps, and a checkpoint of them.
    Anew,
    /// The checkpoint.
    Resumed,
}

/// Parameters after that and two steps more.
fn run<O: Optimizer + Checkpointed>(
    placement: Placement,
    begin: Begin,
    folder: &Path,
    content: Content,
    optimizer: impl Fn(&ShardedModel) -> O + Sync,
) -> Vec<u32> {
    let parameters = on_ranks(4, |world| {
        let options = placed(placement, [2, 2]);
        let init = |param: &Param| match (begin, param.role) {
            (Begin::Resumed, Role::Trainable) => vec![0.0; param.numel()],
            _ => springs::initial(param),
        };
        let mut model = ShardedModel::new(world, partly_frozen(), options, init)?;
        let mut optimizer = optimizer(&model);
        let with = CheckpointOptions { content, ..CheckpointOptions::default() };
        let mut checkpoints = Checkpoints::open(&model, folder, with)?;
        match begin {
            Begin::Anew => {
                train(&mut model, &mut optimizer)?;
                checkpoints.save(&model, &optimizer, &serde_json::Value::Null)?;
            }
            Begin::Resumed => {
                checkpoints.load_latest(&mut model, &mut optimizer)?.expect("there is one");
            }
        }
        train(&mut model, &mut optimizer)?;
        model.full_parameters()
    });
    common(parameters).into_values().flatten().map(f32::to_bits).collect()
}

/// A checkpoint in one place, from which a run goes on in another.
fn compare<O: Optimizer + Checkpointed>(
    [from, to]: [Placement; 2],
    optimizer: impl Fn(&ShardedModel) -> O + Sync + Copy,
) {
    for content in [Content::All, Content::Trainable] {
        let folder = tempfile::tempdir().expect("a folder");
        let expected = run(from, Begin::Anew, folder.path(), content, optimizer);
        let found = run(to, Begin::Resumed, folder.path(), content, optimizer);
        let optimizer = std::any::type_name::<O>();
        assert!(found == expected, "{optimizer} from {from:?} to {to:?}, {content:?}");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn what_was_saved_here_goes_on_there() {
    let adamw = |model: &ShardedModel| AdamW::new(model, AdamWOptions::default());
    let sgd = |model: &ShardedModel| {
        let momentum_kind = MomentumKind::Nesterov;
        Sgd::new(model, SgdOptions { momentum: 0.9, momentum_kind, ..SgdOptions::default() })
    };
    let [optimizer, all] = [Offload::Optimizer, Offload::All].map(offloading);
    for places in [
        [DEVICE, DEVICE],
        [DEVICE, Placement::Host],
        [Placement::Host, DEVICE],
        [all, DEVICE],
        [DEVICE, optimizer],
        [optimizer, all],
    ] {
        compare(places, adamw);
        compare(places, sgd);
    }
}
