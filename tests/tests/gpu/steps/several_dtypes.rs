//! Units that compute in dtypes of their own: they train to the bits of the host, wherever the
//! model lies.

use hsdp::{Accumulation, DType, ModelOptions, Offload, Placement, Precision, StepOptions, Values};
use hsdp_tests::support::models::computing_in;
use hsdp_tests::support::worlds::on_ranks;

use super::super::assert_same;
use super::training::{Trained, Trainer, Training, spec};
use super::{DEVICE, offloading, placed};

fn trained(options: &ModelOptions, dtypes: &[Option<DType>]) -> Vec<Trained> {
    let begin = StepOptions::microbatches(3);
    on_ranks(options.mesh.world_size(), |world| {
        Training::with(world, computing_in(&spec(), dtypes), options, Trainer::AdamW, begin)?
            .train(2)
    })
}

#[test]
#[ignore = "needs a CUDA device"]
fn units_in_several_dtypes_train_to_the_bits_of_the_host() {
    let mixtures: [(DType, &[Option<DType>]); 2] = [
        (DType::BF16, &[None, Some(DType::F32)]),
        (DType::F32, &[Some(DType::F16), None, None, Some(DType::BF16), None]),
    ];
    let places = [DEVICE, offloading(Offload::Optimizer), offloading(Offload::All)];
    for (parameters, dtypes) in mixtures {
        for (placement, accumulation) in places.into_iter().zip(Accumulation::ALL) {
            for mesh in [[1, 1], [1, 2], [2, 2]] {
                let precision =
                    Precision { wire: DType::BF16, ..Precision::compute_in(parameters) };
                let options = ModelOptions { accumulation, precision, ..placed(placement, mesh) };
                let host = ModelOptions { placement: Placement::Host, ..options.clone() };
                let expected = trained(&host, dtypes);
                for (found, expected) in trained(&options, dtypes).into_iter().zip(expected) {
                    assert_eq!(found.moved, expected.moved, "{options:?}, {dtypes:?}");
                    for (name, values) in &expected.parameters {
                        let found = Values::F32(&found.parameters[name]);
                        let what = format!("{name}, {options:?}, {dtypes:?}");
                        assert_same(found, Values::F32(values), &what);
                    }
                }
            }
        }
    }
}
