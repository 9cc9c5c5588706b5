//! The words of the project: those of the field, and none of its own. docs/vocabulary.md has them.

use hsdp_tests::support::sources;

/// Words that were given up, each for one of the field: message, data message, mailbox, request, progress thread, endpoint, rank handle,
/// contribution, pool. A letter is also one of an alphabet: outside of `comm` that is its meaning.
const GIVEN_UP: [&str; 10] = [
    "letter", "parcel", "desk", "errand", "courier", "journey", "office", "seat", "deposit",
    "shelf",
];

/// The words of a line, identifiers taken apart, in lower case.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut last = ' ';
    for letter in line.chars() {
        if !letter.is_ascii_alphabetic()
            || (letter.is_ascii_uppercase() && last.is_ascii_lowercase())
        {
            words.push(String::new());
        }
        if let Some(word) = words.last_mut().filter(|_| letter.is_ascii_alphabetic()) {
            word.push(letter.to_ascii_lowercase());
        }
        last = letter;
    }
    words
}

/// The word of the list that a line has, in the singular or the plural.
fn given_up(line: &str) -> Option<&'static str> {
    let words = words(line);
    let is_there =
        |old: &&str| words.iter().any(|word| word.strip_suffix('s').unwrap_or(word) == *old);
    GIVEN_UP.into_iter().find(is_there)
}

/// Whether a file may not have the words: records and the changelog tell of the past.
fn is_strict(path: &str) -> bool {
    let tells_of_the_past = path == "CHANGELOG.md" || path.starts_with("benches/records/");
    (path.ends_with(".rs") || path.ends_with(".md"))
        && !tells_of_the_past
        && !path.ends_with("tests/words.rs")
}

#[test]
fn words_that_were_given_up_do_not_come_back() {
    let strict: Vec<_> = sources::texts().into_iter().filter(|it| is_strict(&it.path)).collect();
    assert!(strict.len() > 400, "{} files", strict.len());
    for source in strict {
        for (number, line) in source.lines() {
            let found =
                given_up(line).filter(|word| *word != "letter" || source.path.starts_with("comm/"));
            assert_eq!(found, None, "{}:{number}: docs/vocabulary.md has the word", source.path);
        }
    }
}

#[test]
fn a_word_is_found_in_every_form() {
    for line in ["a letter", "LetterBox", "two_letters", "Letters::of", "(letter)", "OFFICE"] {
        assert!(given_up(line).is_some(), "{line}");
    }
    for line in ["lettering", "seated", "official", "a message", "shelfish"] {
        assert_eq!(given_up(line), None, "{line}");
    }
}
