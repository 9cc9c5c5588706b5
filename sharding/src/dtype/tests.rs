use super::*;

#[test]
fn a_dtype_reads_what_it_writes() {
    for dtype in DType::ALL {
        assert_eq!(dtype.to_string().parse::<DType>(), Ok(dtype));
    }
    let error = "F32".parse::<DType>().unwrap_err().to_string();
    let expected = "`F32` is not a valid dtype: expected f32, f16, bf16, f64, i32, i64, u32 or u64";
    assert_eq!(error, expected);
}

#[test]
fn training_has_three_dtypes() {
    let of_training = |dtype: &DType| DType::of_training(dtype.name()).is_ok();
    let all: Vec<DType> = DType::ALL.into_iter().filter(of_training).collect();
    assert_eq!(all, [DType::F32, DType::F16, DType::BF16]);
    let error = DType::of_training("i32").unwrap_err().to_string();
    let expected =
        "`i32` is not a valid dtype of parameters and gradients: expected f32, bf16 or f16";
    assert_eq!(error, expected);
}

#[test]
fn names_tell_size_and_kind() {
    for dtype in DType::ALL {
        let bits: usize = dtype.name().trim_start_matches(char::is_alphabetic).parse().unwrap();
        assert_eq!(dtype.size_bytes() * 8, bits);
        assert_eq!(dtype.is_float(), dtype.name().contains('f'));
    }
}
