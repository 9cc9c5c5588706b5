//! Operations that NCCL carries between processes, about which ranks disagree: no rank updates. The
//! operations are noted as if they had been issued.

use std::fmt::Debug;
use std::sync::Arc;

use hsdp::WorldError::Mismatch;
use hsdp::comm::testing::note_operation;
use hsdp::comm::{Between, Counts, Descriptor};
use hsdp::{
    Channel, CommError, DType, Error, ModelOptions, Op, Optimizer, Rank, Reduction, Sgd,
    SgdOptions, ShardedModel, Tag, World, WorldOptions,
};
use hsdp_tests::support::models::shards;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{DEADLINE, common_error, launched, mesh};

/// The rank whose operation is another, if there is one.
type Odd = Option<usize>;

/// Runs `run` with a model on a mesh of 2 x 2, between threads and between ranks that share no
/// memory.
fn both<T: Send>(run: impl Fn(ShardedModel) -> T + Sync) -> [Vec<T>; 2] {
    [Between::Memory, Between::Messages].map(|between| {
        let options = WorldOptions { between, deadline: DEADLINE, ..WorldOptions::default() };
        let ranks = launched(4, options, |world| {
            let on = ModelOptions::on(mesh(2, 2));
            run(springs::model(world, &on).expect("a model"))
        });
        ranks.into_iter().map(|rank| rank.expect("no rank panics")).collect()
    })
}

/// Notes an operation of the shard group.
fn note(world: &World, odd: Odd) {
    let rank = world.rank().index();
    let group = [rank / 2 * 2, rank / 2 * 2 + 1].map(Rank::new);
    let group = world.group(&group, Channel::Reduce).expect("a group");
    let dtype = if odd == Some(rank) { DType::F16 } else { DType::BF16 };
    let operation = Descriptor {
        group: group.id(),
        channel: Channel::Reduce,
        epoch: 0,
        sequence: 5,
        op: Op::ReduceScatter,
        reduction: Some(Reduction::Sum),
        dtype: Some(dtype),
        counts: Counts::Each(8),
        root: None,
        peer: None,
        scaling: None,
        tag: Tag::default().step(1),
    };
    note_operation(world, &Arc::new(operation));
}

/// One step for which an operation is noted.
fn step(model: &mut ShardedModel, sgd: &mut Sgd, odd: Odd) -> Result<(), Error> {
    note(model.world(), odd);
    let gradients = springs::gradients(model, 1)?;
    sgd.step(model, gradients).map(drop)
}

/// The table with which all ranks ended.
fn table<T: Debug>(ends: Vec<Result<T, Error>>) -> String {
    match common_error(ends) {
        Error::Comm(CommError::World(Mismatch(table))) => table.to_string(),
        other => panic!("{other}"),
    }
}

/// Ranks 2 and 3 have these dtypes.
fn expected(dtypes: [&str; 2]) -> String {
    let [two, three] = dtypes
        .map(|dtype| format!("reduce_scatter sum {dtype} 8 elements, user, step 1, microbatch 0"));
    let problem = "ranks disagree about operation 5 on channel reduce, epoch 0";
    format!("{problem}:\n  rank 2: {two}\n  rank 3: {three}")
}

#[test]
fn a_step_in_which_operations_differ_updates_no_rank() {
    let ends = both(|mut model| {
        let mut sgd = Sgd::new(&model, SgdOptions::default());
        step(&mut model, &mut sgd, None).expect("all ranks note the same");
        let before = shards(&model);
        let end = step(&mut model, &mut sgd, Some(3));
        assert_eq!(shards(&model), before, "no rank has updated");
        assert_eq!(model.committed_steps(), 1);
        end
    });
    for ends in ends {
        assert_eq!(table(ends), expected(["bf16", "f16"]));
    }
}

#[test]
fn an_evaluation_in_which_operations_differ_has_no_mean() {
    let ends = both(|mut model| {
        let mut mean = |odd| {
            note(model.world(), odd);
            model.evaluation()?.mean(1.0, 2)
        };
        assert!(mean(None).is_ok_and(|mean| mean == 0.5));
        mean(Some(2))
    });
    let finished = both(|mut model| {
        note(model.world(), Some(2));
        model.evaluation()?.finish().map(|()| f64::NAN)
    });
    for ends in ends.into_iter().chain(finished) {
        assert_eq!(table(ends), expected(["f16", "bf16"]));
    }
}
