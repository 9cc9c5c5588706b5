//! A unit that is gathered on a device, and its copies on the host.

use std::panic::{AssertUnwindSafe, catch_unwind};

use hsdp::{
    DType, Error, Full, GradientValues, HostBuffer, LossSum, ModelOptions, Precision, StepOptions,
    UnitId,
};
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::on_ranks;

use super::super::{assert_same, download, stream};
use super::training::spec;
use super::{DEVICE, PLACES, placed};

/// Does something with each unit that a rank gathers.
fn with_each_unit(options: &ModelOptions, look: impl Fn(UnitId, Full) + Sync) {
    on_ranks(options.mesh.world_size(), |world| -> Result<(), Error> {
        let mut model = springs::model_of(world, &spec(), options)?;
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        let mut pass = step.microbatch()?;
        for id in (0..spec().units().len()).map(UnitId::new) {
            look(id, pass.unshard(id)?);
        }
        let _ = pass.loss(LossSum::new(0.0, 1))?;
        pass.finish()?;
        step.finish().map(drop)
    });
}

/// Returns the first values of a parameter, in a dtype.
fn initial(unit: UnitId, index: usize, dtype: DType) -> HostBuffer {
    let values = springs::initial(&spec()[unit].params[index]);
    let mut rounded = HostBuffer::zeros(dtype, values.len()).expect("memory");
    hsdp_kernels::cast(rounded.values_mut(), &values);
    rounded
}

#[test]
#[ignore = "needs a CUDA device"]
fn parameters_lie_on_the_device_with_the_elements_that_the_host_reads() {
    for parameters in [DType::F32, DType::BF16, DType::F16] {
        let options =
            ModelOptions { precision: Precision::compute_in(parameters), ..placed(DEVICE, [1, 3]) };
        with_each_unit(&options, |id, full| {
            let stream = stream();
            for index in 0..spec()[id].params.len() {
                let what = format!("parameter {index} of unit {id}, {parameters}");
                let expected = initial(id, index, parameters);
                let part = full.on_device(index).expect("it lies on a device");
                let slice = part.on_device().expect("it lies on a device");
                let unit = download(&stream, slice.buffer());
                assert_same(unit.values().slice(slice.range()), expected.values(), &what);
                assert_same(full.values(index), expected.values(), &what);
                assert_eq!(full.as_f32(index).is_some(), parameters == DType::F32, "{what}");
            }
        });
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_part_outlives_the_unit_of_which_it_is() {
    with_each_unit(&placed(DEVICE, [1, 2]), |id, full| {
        let expected = initial(id, 0, DType::F32);
        let part = full.on_device(0).expect("it lies on a device");
        drop(full);
        part.read(0..part.len(), &mut |values| {
            assert_same(values, expected.values(), "a part of a unit that was dropped");
        });
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn what_is_taken_out_is_a_copy_each_time() {
    with_each_unit(&placed(DEVICE, [1, 2]), |id, mut full| {
        let expected = initial(id, 0, DType::F32);
        let mut taken = full.take(0).expect("there is one");
        if let hsdp_kernels::ValuesMut::F32(values) = taken.values_mut() {
            values.fill(7.0);
        }
        full.put_back(0, taken);
        assert_same(full.values(0), expected.values(), "what is read after a copy was changed");
        let [first, second] = [(); 2].map(|()| full.take(0).expect("there is one"));
        assert_same(first.values(), expected.values(), "a copy");
        assert_same(second.values(), expected.values(), "another");
    });
}

/// On the host, and on a device where it would be thrown away: it is not what was taken out.
#[test]
#[ignore = "needs a CUDA device"]
fn a_buffer_of_another_dtype_or_length_is_not_taken_back() {
    for placement in PLACES {
        with_each_unit(&placed(placement, [1, 2]), |_, mut full| {
            let len = full.values(0).len();
            for (dtype, len) in [(DType::F32, len + 1), (DType::BF16, len)] {
                let other = HostBuffer::zeros(dtype, len).expect("memory");
                let put = catch_unwind(AssertUnwindSafe(|| full.put_back(0, other)));
                let said = *put.expect_err("it does not fit").downcast::<String>().expect("text");
                assert!(said.starts_with(&format!("put back ({dtype:?}, {len}), ")), "{said}");
            }
        });
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_unit_on_the_host_lies_on_no_device() {
    with_each_unit(&placed(hsdp::Placement::Host, [1, 2]), |id, full| {
        let mut indices = 0..spec()[id].params.len();
        assert!(indices.all(|index| full.on_device(index).is_none()));
    });
}
