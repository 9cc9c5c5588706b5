//! Frames and letters that may be anything: what the fuzzers have found, and changes of it that are made here.
//!
//! `fuzz/run.sh` looks for more.

mod inputs;

use std::fs;
use std::panic;
use std::path::Path;

use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

/// Changes of each input.
const CHANGES: u64 = 1000;

/// What was found for a target, by name.
fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let entries = fs::read_dir(&folder).expect("a corpus");
    let read = |entry: fs::DirEntry| {
        (entry.path().display().to_string(), fs::read(entry.path()).expect("an input"))
    };
    let mut inputs: Vec<_> = entries.map(|entry| read(entry.expect("an entry"))).collect();
    inputs.sort();
    assert!(inputs.len() > 5, "{}: {} inputs", folder.display(), inputs.len());
    inputs
}

/// Some bytes are other bytes, are left out, or come twice; or a number is a large one.
fn changed(random: &mut ChaCha8Rng, input: &[u8]) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..random.random_range(1..=4) {
        if bytes.is_empty() {
            return bytes;
        }
        let at = random.random_range(0..bytes.len());
        let end = (at + random.random_range(1..=8)).min(bytes.len());
        match random.random_range(0..5) {
            0 => bytes[at] = random.random(),
            1 => drop(bytes.drain(at..end)),
            2 => {
                let again = bytes[at..end].to_vec();
                drop(bytes.splice(at..at, again));
            }
            3 => bytes[at] ^= 1 << random.random_range(0..8),
            _ => {
                let number = [0xff; 9].into_iter().take(random.random_range(0..=9));
                drop(bytes.splice(at..end, number.chain([1])));
            }
        }
    }
    bytes
}

fn run(name: &str, target: fn(&[u8])) {
    for (number, (path, input)) in (0..).zip(corpus(name)) {
        run_one(target, &input, &path);
        for change in 0..CHANGES {
            let mut random = ChaCha8Rng::seed_from_u64(number * CHANGES + change);
            let changed = changed(&mut random, &input);
            run_one(target, &changed, &format!("{path}, change {change}: {changed:?}"));
        }
    }
}

/// Says what the input was if the target panics.
fn run_one(target: fn(&[u8]), input: &[u8], what: &str) {
    let ended = panic::catch_unwind(|| target(input));
    assert!(ended.is_ok(), "with {what}");
}

#[test]
fn a_frame_that_may_be_anything_is_read_or_refused() {
    run("frame", inputs::frame);
}

#[test]
fn a_members_letter_that_may_be_anything_is_read_or_refused() {
    run("member", inputs::member);
}

#[test]
fn a_coordinators_letter_that_may_be_anything_is_read_or_refused() {
    run("coordinator", inputs::coordinator);
}

#[test]
fn the_corpora_have_what_is_taken_and_what_is_refused() {
    use hsdp_control::wire::{CoordinatorLetter, Frame, MemberLetter};
    use prost::Message as _;
    let taken = |target: &str, is: &dyn Fn(&[u8]) -> bool| {
        corpus(target).iter().filter(|(_, input)| is(input)).count()
    };
    let frame = |input: &[u8]| Frame::decode(input).is_ok_and(|frame| frame.checked().is_ok());
    assert_eq!((taken("frame", &frame), corpus("frame").len()), (7, 16));
    let member = |input: &[u8]| MemberLetter::read(input).is_ok();
    assert_eq!((taken("member", &member), corpus("member").len()), (7, 11));
    let coordinator = |input: &[u8]| CoordinatorLetter::read(input).is_ok();
    assert_eq!((taken("coordinator", &coordinator), corpus("coordinator").len()), (19, 27));
}
