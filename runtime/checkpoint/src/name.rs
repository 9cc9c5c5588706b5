//! Names of directories, files and tensors.

use std::hash::{BuildHasher as _, RandomState};
use std::path::Path;

/// The prefix of the names of tensors that hold optimizer state.
pub const STATE: &str = "optimizer:";

/// The name that safetensors reserves for metadata: no tensor may have it.
pub const RESERVED: &str = "__metadata__";
pub(crate) const MANIFEST: &str = "manifest.json";
pub(crate) const LEASE: &str = "lease";
pub(crate) const LATEST: &str = "latest";
const GENERATION: &str = "step-";
const WRITING: &str = ".writing-";
const DELETED: &str = ".deleted-";

/// Returns the name of the tensor that holds one kind of optimizer state of a parameter:
/// `optimizer:exp_avg:w1`.
#[must_use]
pub fn state_tensor(kind: &str, parameter: &str) -> String {
    format!("{STATE}{kind}:{parameter}")
}

/// The name of a generation's directory.
pub(crate) fn generation(step: u64) -> String {
    format!("{GENERATION}{step:08}")
}

/// The step of a generation's directory; `None` for any other path.
pub(crate) fn step_of(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_str()?;
    let step = name.strip_prefix(GENERATION)?.parse().ok()?;
    (generation(step) == name).then_some(step)
}

/// The name of the directory in which a generation is written.
pub(crate) fn writing(step: u64, nonce: u64) -> String {
    format!("{WRITING}{}-{nonce:016x}", generation(step))
}

/// The bytes that every file system allows in a name.
const SHORT: usize = 40;

/// Returns the name of a folder `name` while it is written. It begins with that name, which is cut
/// so that a name of the same length is allowed too, wherever `name` is.
pub(crate) fn unfinished(name: &str, nonce: u64) -> String {
    let end = format!(".writing-{nonce:016x}");
    let room = name.len().max(SHORT) - ".".len() - end.len();
    format!(".{}{end}", &name[..name.floor_char_boundary(room)])
}

/// The name of a generation's directory while it is removed.
pub(crate) fn deleted(step: u64, nonce: u64) -> String {
    format!("{DELETED}{}-{nonce:016x}", generation(step))
}

/// Whether this is an unfinished or partly removed generation.
pub(crate) fn is_left_behind(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.starts_with(WRITING) || name.starts_with(DELETED)
}

/// Whether a name from a manifest can only mean a file in the manifest's own directory.
pub(crate) fn is_plain(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    !name.is_empty() && name.len() <= 255 && !name.starts_with('.') && name.bytes().all(is_allowed)
}

/// Returns a random number for the name of a new draft's directory, so that no other draft of the
/// store has the same name.
#[must_use]
pub fn nonce() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_read_as_it_was_written_and_not_otherwise() {
        for step in [0, 120, 99_999_999, 100_000_000, u64::MAX] {
            assert_eq!(step_of(Path::new(&generation(step))), Some(step));
        }
        for other in
            ["step-120", "step-+0000120", "step-", "step-00000120.old", ".writing-step-00000120-0"]
        {
            assert_eq!(step_of(Path::new(other)), None, "{other}");
        }
    }

    #[test]
    fn an_unfinished_folder_has_a_name_that_is_allowed_where_its_own_is() {
        assert_eq!(unfinished("model", 7), ".model.writing-0000000000000007");
        for name in ["m".repeat(14), "m".repeat(15), "m".repeat(255), "ü".repeat(127)] {
            let unfinished = unfinished(&name, u64::MAX);
            assert!(unfinished.len() <= name.len().max(SHORT), "{unfinished}");
            assert!(unfinished.starts_with(".m") || unfinished.starts_with(".ü"), "{unfinished}");
        }
    }

    #[test]
    fn names_that_leave_the_directory_are_not_plain() {
        for name in ["r00000-of-00004.safetensors", "a", "A_b-c.1"] {
            assert!(is_plain(name), "{name}");
        }
        let long = "a".repeat(256);
        for name in ["", ".", "..", ".hidden", "../a", "a/b", "/a", "a\\b", "a\0", "ä", &long] {
            assert!(!is_plain(name), "{name}");
        }
    }

    #[test]
    fn what_is_in_the_making_or_half_removed_is_left_behind() {
        assert!(is_left_behind(Path::new(&format!("store/{}", writing(3, 7)))));
        assert!(is_left_behind(Path::new(&format!("store/{}", deleted(3, 7)))));
        assert!(!is_left_behind(Path::new("store/step-00000003")));
        assert!(!is_left_behind(Path::new("store/lease")));
    }
}
