//! Comparison of two outputs, bit by bit.

use candle_core::{CpuStorage, Device, Result, Storage, Tensor};

/// Returns whether two tensors have the same shape, dtype and bits. Tensors on a GPU are copied to
/// the host.
pub(super) fn are_same_bits(left: &Tensor, right: &Tensor) -> Result<bool> {
    if left.dims() != right.dims() || left.dtype() != right.dtype() {
        return Ok(false);
    }
    let on_host = |tensor: &Tensor| tensor.detach().contiguous()?.to_device(&Device::Cpu);
    let (left, right) = (on_host(left)?, on_host(right)?);
    let (left, right) = (left.storage_and_layout(), right.storage_and_layout());
    let range = |layout: &candle_core::Layout| {
        let start = layout.start_offset();
        start..start + layout.shape().elem_count()
    };
    let (of_left, of_right) = (range(left.1), range(right.1));
    Ok(match (&*left.0, &*right.0) {
        (Storage::Cpu(CpuStorage::F32(left)), Storage::Cpu(CpuStorage::F32(right))) => {
            same(&left[of_left], &right[of_right], |value| value.to_bits())
        }
        (Storage::Cpu(CpuStorage::F64(left)), Storage::Cpu(CpuStorage::F64(right))) => {
            same(&left[of_left], &right[of_right], |value| value.to_bits())
        }
        (Storage::Cpu(CpuStorage::BF16(left)), Storage::Cpu(CpuStorage::BF16(right))) => {
            same(&left[of_left], &right[of_right], |value| value.to_bits())
        }
        (Storage::Cpu(CpuStorage::F16(left)), Storage::Cpu(CpuStorage::F16(right))) => {
            same(&left[of_left], &right[of_right], |value| value.to_bits())
        }
        _ => false,
    })
}

fn same<T, B: PartialEq>(left: &[T], right: &[T], bits: impl Fn(&T) -> B) -> bool {
    left.len() == right.len()
        && left.iter().zip(right).all(|(left, right)| bits(left) == bits(right))
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;

    fn of(values: &[f32], dtype: DType) -> Tensor {
        Tensor::new(values, &Device::Cpu).and_then(|it| it.to_dtype(dtype)).expect("a float")
    }

    #[test]
    fn each_bit_counts_in_each_dtype() {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let same = |left: &[f32], right: &[f32]| {
                are_same_bits(&of(left, dtype), &of(right, dtype)).expect("on the host")
            };
            assert!(same(&[1.0, f32::NAN], &[1.0, f32::NAN]));
            assert!(!same(&[0.0], &[-0.0]), "{dtype:?}");
            assert!(!same(&[1.0], &[1.0, 1.0]), "{dtype:?}");
        }
        let mixed = are_same_bits(&of(&[1.0], DType::F32), &of(&[1.0], DType::F64));
        assert!(!mixed.expect("on the host"));
    }

    #[test]
    fn views_are_compared_by_their_elements() {
        let rows = Tensor::new(&[[1_f32, 2.0], [3.0, 4.0]], &Device::Cpu).expect("2 x 2");
        let column = rows.t().and_then(|it| it.narrow(0, 1, 1)).expect("a column");
        let want = Tensor::new(&[[2_f32, 4.0]], &Device::Cpu).expect("a row");
        assert!(are_same_bits(&column, &want).expect("on the host"));
        assert!(!are_same_bits(&rows.narrow(0, 1, 1).expect("a row"), &want).expect("on the host"));
    }
}
