//! Where a model cannot be placed.

use hsdp::{
    DType, Error, ModelOptions, ModelSpec, Offload, Param, Placement, Precision, Unit, World,
};
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common_error, outcomes};

use super::{DEVICE, offloading, placed};

/// There is no machine with so many devices.
const NOWHERE: Placement = Placement::Cuda { ordinal: 9999, offload: Offload::None };

fn model(world: World, options: &ModelOptions) -> Result<(), Error> {
    springs::model(world, options).map(drop)
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_device_that_is_not_there_is_named() {
    let error = model(World::single(), &placed(NOWHERE, [1, 1])).expect_err("it is not there");
    assert!(matches!(error, Error::Placement { .. }) && !error.is_fatal(), "{error:?}");
    let said = error.to_string();
    let begins =
        "the model cannot be placed on the device: there is no CUDA device 9999: the driver has ";
    assert!(said.starts_with(begins), "{said}");
}

/// The other rank gets the reason, and not that rank 1 has left.
#[test]
#[ignore = "needs a CUDA device"]
fn a_rank_without_its_device_is_named_to_the_others() {
    let told = outcomes(2, |world| {
        let placement = if world.rank().index() == 1 { NOWHERE } else { DEVICE };
        model(world, &placed(placement, [1, 2]))
    });
    let told: Vec<String> =
        told.into_iter().map(|end| end.expect_err("no rank has a model").to_string()).collect();
    assert!(told[1].starts_with("the model cannot be placed on the device: "), "{}", told[1]);
    let told_to_others = "step 0 aborted by rank 1: the model cannot be placed on the device: ";
    assert!(told[0].starts_with(told_to_others), "{}", told[0]);
}

#[test]
#[ignore = "needs a CUDA device"]
fn ranks_whose_parts_lie_in_different_kinds_of_places_disagree() {
    let error = common_error(outcomes(2, |world| {
        let placement = if world.rank().index() == 1 { DEVICE } else { Placement::Host };
        model(world, &placed(placement, [1, 2]))
    }));
    assert_eq!(
        error.to_string(),
        "an option of the model differs between ranks: rank 1 has placement cuda, rank 0 has placement cpu"
    );
}

/// Replicas would be updated by other arithmetic.
#[test]
#[ignore = "needs a CUDA device"]
fn ranks_that_offload_differently_disagree() {
    let error = common_error(outcomes(2, |world| {
        let placement = if world.rank().index() == 1 { offloading(Offload::All) } else { DEVICE };
        model(world, &placed(placement, [1, 2]))
    }));
    assert_eq!(
        error.to_string(),
        "an option of the model differs between ranks: rank 1 has placement cuda, offloading all, rank 0 has placement cuda"
    );
}

/// This needs no device: the refusal comes first.
#[test]
fn parameters_without_a_master_are_refused_on_a_device() {
    let base = Param::new("base", [5]).frozen().stored_in(DType::BF16);
    let spec = ModelSpec::new().unit(Unit::new("unit").param(base));
    let precision = Precision::compute_in(DType::BF16);
    let options = ModelOptions { precision, ..placed(DEVICE, [1, 1]) };
    let made = springs::model_of(World::single(), &spec, &options);
    let told = made.expect_err("the device has masters").to_string();
    assert!(told.contains("parameter `base`, stored in bf16: a model on a device"), "{told}");
}
