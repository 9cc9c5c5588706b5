//! Inputs that fuzzers have found, and changes of them that are made here: part of
//! `tests/fuzz/main.rs` of each crate that reads bytes of others.
//!
//! A corpus is a file with a line for each input: its name, and its bytes in hexadecimal digits.
//! `tests/fuzz/run.sh` looks for more inputs.

use std::fs;
use std::panic;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use rand::{Rng as _, RngCore as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

/// Changes of each input.
const CHANGES: u64 = 1000;

/// The inputs for a target, with their names.
pub(crate) fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(target);
    let text = fs::read_to_string(&file).expect("a corpus");
    let inputs: Vec<_> = text.lines().map(input).collect();
    assert!(inputs.len() > 5, "{}: {} inputs", file.display(), inputs.len());
    inputs
}

fn input(line: &str) -> (String, Vec<u8>) {
    let (name, digits) = line.split_once(' ').expect("a name, and bytes");
    let byte = |pair: &[u8]| {
        let pair = str::from_utf8(pair).expect("hexadecimal digits");
        u8::from_str_radix(pair, 16).expect("a byte")
    };
    (name.to_owned(), digits.as_bytes().chunks(2).map(byte).collect())
}

/// How many inputs of a target are taken, and how many there are.
pub(crate) fn taken(target: &str, is_taken: impl Fn(&[u8]) -> bool) -> (usize, usize) {
    let inputs = corpus(target);
    (inputs.iter().filter(|(_, input)| is_taken(input)).count(), inputs.len())
}

/// Runs a target with each of its inputs, and with changes of them.
pub(crate) fn run(name: &str, target: fn(&[u8])) {
    for (number, (input_name, input)) in (0..).zip(corpus(name)) {
        run_one(target, &input, &input_name);
        for change in 0..CHANGES {
            let mut random = ChaCha8Rng::seed_from_u64(number * CHANGES + change);
            let changed = changed(&mut random, &input);
            run_one(target, &changed, &format!("{input_name}, change {change}: {changed:?}"));
        }
    }
}

/// Says what the input was if the target panics. One at a time: some measure what all threads
/// share.
fn run_one(target: fn(&[u8]), input: &[u8], what: &str) {
    static ONE: Mutex<()> = Mutex::new(());
    let guard = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let ended = panic::catch_unwind(|| target(input));
    drop(guard);
    assert!(ended.is_ok(), "with {what}");
}

/// Some bytes are other bytes, are left out, or come twice; or a number is another, in bytes or in
/// digits.
fn changed(random: &mut ChaCha8Rng, input: &[u8]) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..random.random_range(1..=4) {
        if bytes.is_empty() {
            return bytes;
        }
        let at = random.random_range(0..bytes.len());
        let end = (at + random.random_range(1..=8)).min(bytes.len());
        match random.random_range(0..6) {
            0 => bytes[at] = random.random(),
            1 => drop(bytes.drain(at..end)),
            2 => {
                let again = bytes[at..end].to_vec();
                drop(bytes.splice(at..at, again));
            }
            3 => bytes[at] ^= 1 << random.random_range(0..8),
            4 => {
                let number = [0xff; 9].into_iter().take(random.random_range(0..=9));
                drop(bytes.splice(at..end, number.chain([1])));
            }
            _ => {
                let number = random.next_u64() >> random.random_range(0..64);
                drop(bytes.splice(at..end, number.to_string().into_bytes()));
            }
        }
    }
    bytes
}
