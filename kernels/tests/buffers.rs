//! Buffers, their borrowed values, and the trait of gradients, as a user of the crate sees them.

use std::ops::Range;
use std::sync::{Arc, RwLock, RwLockReadGuard};

use half::{bf16, f16};
use hsdp_kernels::{
    Element, Error, GradientValues, HostBuffer, Real, Values, ValuesMut, Wire, cast,
};
use hsdp_sharding::{ByteCount, DType};

const REALS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

#[test]
fn a_buffer_of_zeros_knows_its_dtype_length_and_size() {
    for dtype in REALS {
        let buffer = HostBuffer::zeros(dtype, 33).unwrap();
        assert_eq!((buffer.dtype(), buffer.len(), buffer.is_empty()), (dtype, 33, false));
        assert_eq!(buffer.bytes(), ByteCount(33 * dtype.size_bytes() as u64));
        assert_eq!(buffer.values().to_f32(), [0.0; 33]);
        assert!(HostBuffer::zeros(dtype, 0).unwrap().is_empty());
    }
}

#[test]
fn other_dtypes_are_refused_by_name() {
    for dtype in [DType::F64, DType::I32, DType::I64, DType::U32, DType::U64] {
        assert_eq!(HostBuffer::zeros(dtype, 1), Err(Error::NotReal { dtype }));
        assert_eq!(Wire::try_from(dtype), Err(Error::NotReal { dtype }));
    }
    assert_eq!(
        Error::NotReal { dtype: DType::I64 }.to_string(),
        "i64 is not a dtype of parameters or gradients: expected f32, f16 or bf16"
    );
}

#[test]
fn a_wire_is_a_dtype_and_rounds_to_it() {
    for dtype in REALS {
        let wire = Wire::try_from(dtype).unwrap();
        assert_eq!((wire.dtype(), wire.to_string()), (dtype, dtype.to_string()));
    }
    let third = 1.0 / 3.0;
    assert_eq!(Wire::F32.round(third), third);
    assert_eq!(Wire::F16.round(third), f16::from_f32(third).to_f32());
    assert_eq!(Wire::BF16.round(third), bf16::from_f32(third).to_f32());
}

#[test]
fn parts_are_lent_and_written() {
    for dtype in REALS {
        let mut buffer = HostBuffer::zeros(dtype, 5).unwrap();
        let mut lent = buffer.values_mut();
        cast(lent.reborrow().slice(0..2), &[1.0, 2.0]);
        cast(lent.reborrow().slice(4..5), &[5.0]);
        assert_eq!((lent.len(), lent.is_empty(), lent.dtype()), (5, false, dtype));
        assert_eq!(buffer.values().slice(1..5).to_f32(), [2.0, 0.0, 0.0, 5.0]);
    }
}

#[test]
fn a_type_and_its_dtype_agree() {
    fn check<T: Real>() {
        let mut elements = vec![T::zeroed(); 3];
        assert_eq!(T::values(&elements).dtype(), T::DTYPE);
        assert_eq!(T::values_mut(&mut elements).dtype(), T::DTYPE);
        assert_eq!(T::DTYPE.size_bytes(), size_of::<T>());
    }
    check::<f32>();
    check::<f16>();
    check::<bf16>();
    let others = [f64::DTYPE, i32::DTYPE, i64::DTYPE, u32::DTYPE, u64::DTYPE];
    assert_eq!(others, [DType::F64, DType::I32, DType::I64, DType::U32, DType::U64]);
}

fn read(gradient: &dyn GradientValues, range: Range<usize>) -> Vec<f32> {
    let mut visits = Vec::new();
    gradient.read(range, &mut |values| visits.push(values.to_f32()));
    assert_eq!(visits.len(), 1, "a read is one visit");
    visits.remove(0)
}

#[test]
fn vectors_and_buffers_are_gradients() {
    let gradients: [Arc<dyn GradientValues>; 4] = [
        Arc::new(vec![1.0_f32, 2.0, 3.0]),
        Arc::new([1.0, 2.0, 3.0].map(f16::from_f32).to_vec()),
        Arc::new([1.0, 2.0, 3.0].map(bf16::from_f32).to_vec()),
        Arc::new(HostBuffer::from([1.0, 2.0, 3.0].map(bf16::from_f32).to_vec())),
    ];
    for gradient in gradients {
        assert_eq!(gradient.len(), 3);
        assert_eq!(read(&*gradient, 1..3), [2.0, 3.0]);
        assert!(read(&*gradient, 3..3).is_empty());
    }
}

/// A tensor behind a lock, as in an autograd.
#[derive(Debug)]
struct Tensor(RwLock<Vec<f32>>);

impl Tensor {
    fn lock(&self) -> RwLockReadGuard<'_, Vec<f32>> {
        self.0.read().expect("no thread panicked under the lock")
    }
}

impl GradientValues for Tensor {
    fn len(&self) -> usize {
        self.lock().len()
    }

    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        visit(Values::F32(&self.lock()[range]));
    }
}

#[test]
fn outsiders_lend_what_lies_behind_a_lock() {
    let tensor = Tensor(RwLock::new(vec![4.0, 5.0]));
    assert_eq!(read(&tensor, 0..2), [4.0, 5.0]);
    assert!(!tensor.is_empty());
}

#[test]
fn buffers_compare_and_convert() {
    assert_eq!(HostBuffer::from(vec![0.0_f32; 2]), HostBuffer::zeros(DType::F32, 2).unwrap());
    assert_ne!(HostBuffer::from(vec![f16::ZERO; 2]), HostBuffer::zeros(DType::BF16, 2).unwrap());
    assert_eq!(ValuesMut::F32(&mut [1.0]).as_values(), Values::F32(&[1.0]));
}
