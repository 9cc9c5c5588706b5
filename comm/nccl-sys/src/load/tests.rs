use super::*;

#[test]
fn the_variable_alone_names_the_library() {
    assert_eq!(names(Some("a/libnccl.so".into())), ["a/libnccl.so"]);
    assert_eq!(names(None), ["libnccl.so.2", "libnccl.so"]);
}
