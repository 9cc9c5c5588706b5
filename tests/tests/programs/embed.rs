//! The example `embed` as a program: it learns, and a full disk is an error.

use hsdp_train::testing::{bounded, example, on_a_full_disk};

#[test]
fn it_learns_and_prints_its_losses() {
    let output = bounded(example("embed")).output().expect("the program starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let losses = String::from_utf8(output.stdout).expect("UTF-8");
    assert_eq!(losses.lines().count(), 6, "{losses}");
    assert!(losses.starts_with("step   0  loss "), "{losses}");
}

#[test]
fn a_full_disk_is_one_line_and_no_success() {
    let output = on_a_full_disk(&mut bounded(example("embed"))).expect("the program starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), error.lines().count()), (Some(1), 1), "{error}");
    assert!(error.contains("No space left on device"), "{error}");
}
