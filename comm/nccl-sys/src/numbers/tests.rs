use super::*;

#[test]
fn a_number_displays_as_its_name_or_as_itself() {
    assert_eq!(ncclResult_t::ncclSuccess.to_string(), "ncclSuccess");
    assert_eq!(ncclResult_t(8).to_string(), "ncclTimeout");
    assert_eq!(ncclResult_t(4711).to_string(), "4711");
    assert_eq!(ncclResult_t(-3).to_string(), "-3");
    assert_eq!(ncclDataType_t::ncclFloat16.to_string(), "ncclFloat16");
    assert_eq!(ncclRedOp_t(5).to_string(), "5");
}

#[test]
fn only_zero_is_success() {
    let named = ncclResult_t::NUMBERS.iter().map(|number| number.value.try_into().expect("an int"));
    let successes: Vec<c_int> =
        named.chain([9, -1]).filter(|n| ncclResult_t(*n) == ncclResult_t::ncclSuccess).collect();
    assert_eq!(successes, [0]);
}

#[test]
fn a_number_has_the_size_and_alignment_of_an_int() {
    assert_eq!(size_of::<ncclDataType_t>(), size_of::<c_int>());
    assert_eq!(align_of::<ncclDataType_t>(), align_of::<c_int>());
}
