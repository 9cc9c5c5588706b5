//! Prints warnings to stderr, once for each text.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Mutex, PoisonError};

use crate::{Warning, stderr};

/// Number of remembered texts. If more different ones follow, a text is shown again.
const REMEMBERED: usize = 1000;

/// Digests of the latest texts, newest last.
static SHOWN: Mutex<VecDeque<u64>> = Mutex::new(VecDeque::new());

/// Writes a warning to stderr, unless its text is among the latest ones.
#[doc(hidden)]
pub fn show(warning: &Warning) {
    let text = warning.text();
    if is_new(&text) {
        stderr::write(format!("hsdp: {text}\n"));
    }
}

fn is_new(text: &str) -> bool {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    let digest = hasher.finish();
    let mut shown = SHOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if shown.contains(&digest) {
        return false;
    }
    if shown.len() == REMEMBERED {
        shown.pop_front();
    }
    shown.push_back(digest);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_new_once_and_the_memory_is_bounded() {
        let texts: Vec<String> = (0..REMEMBERED + 1).map(|number| number.to_string()).collect();
        assert!(texts.iter().all(|text| is_new(text)));
        assert!(!texts[1..].iter().any(|text| is_new(text)));
        assert!(is_new(&texts[0]), "it is the oldest, and was forgotten");
        assert_eq!(SHOWN.lock().expect("no panic").len(), REMEMBERED);
    }
}
