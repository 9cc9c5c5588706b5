//! Faults that a model cannot have are refused where it is made: on all ranks alike, also where
//! only one process has the fault.

use std::time::{Duration, Instant};

use hsdp::WorldError::BadFault;
use hsdp::testing::{Between, Fault, FaultKind, FaultPlace};
use hsdp::{
    CommError, Error, FullCopies, ModelOptions, Rank, ShardedModel, Stage, World, WorldOptions,
    launch,
};
use hsdp_tests::support::models::{one_parameter, unit};
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{launched, mesh};

fn model(world: World) -> Result<ShardedModel, Error> {
    let options = ModelOptions { full_copies: FullCopies::PerRank, ..ModelOptions::on(mesh(1, 2)) };
    springs::model(world, &options)
}

/// Longer than the test takes: no rank may wait for it.
const DEADLINE: Duration = Duration::from_secs(60);

fn with(fault: Fault, between: Between) -> WorldOptions {
    WorldOptions { faults: vec![fault], between, deadline: DEADLINE, ..WorldOptions::default() }
}

#[test]
fn a_fault_at_a_unit_that_the_model_does_not_have_is_refused_on_all_ranks() {
    let started = Instant::now();
    for between in [Between::Memory, Between::Messages] {
        for place in [FaultPlace::Unit(unit(3)), (unit(u32::MAX as usize), Stage::Reduce).into()] {
            let fault = Fault::at(Rank::new(1), 0, place, FaultKind::Panic);
            for ended in launched(2, with(fault, between), |world| model(world).map(drop)) {
                let error = ended.expect("no panic").expect_err("it is refused");
                assert!(matches!(error, Error::Comm(CommError::World(BadFault { .. }))), "{error}");
                assert!(error.is_fatal());
                let expected = format!("fault `{fault}`: the model has 3 units, numbered from 0");
                assert_eq!(error.to_string(), expected);
            }
        }
    }
    assert!(started.elapsed() < DEADLINE / 2);
}

#[test]
fn a_fault_at_the_last_unit_is_one() {
    let fault = Fault::at(Rank::new(1), 7, unit(2), FaultKind::Panic);
    let ended = launch(2, with(fault, Between::Memory), |world| model(world).map(drop));
    assert!(ended.iter().all(Result::is_ok), "{ended:?}");
}

#[test]
fn a_second_model_of_the_world_may_have_fewer_units() {
    let fault = Fault::at(Rank::new(1), 7, unit(2), FaultKind::Panic);
    for between in [Between::Memory, Between::Messages] {
        let ended = launch(2, with(fault, between), |world| {
            model(world.clone())?;
            let options = ModelOptions::on(mesh(1, 2));
            ShardedModel::new(world, one_parameter(20), options, springs::initial).map(drop)
        });
        assert!(ended.iter().all(Result::is_ok), "{ended:?}");
    }
}
