//! Every unsafe block cites an invariant, every invariant is defined, and every definition names a
//! test that exists.
//!
//! docs/invariants.md defines an invariant as ``- **K-1** statement. Test: `path::name`.``, over as
//! many lines as it takes; several tests are separated by commas.

use std::collections::BTreeMap;

use hsdp_tests::support::sources::{self, Source};

const PAGE: &str = "docs/invariants.md";
/// This file speaks of labels; that cites none.
const HERE: &str = "tests/tests/sources/invariants.rs";

#[test]
fn every_safety_comment_cites_an_invariant_that_is_defined() {
    let defined = invariants();
    for source in sources::rust() {
        for (number, line) in source.lines() {
            let Some(reason) = safety_comment(line) else { continue };
            let cited = labels(reason);
            assert!(!cited.is_empty(), "{}:{number}: cite a label of {PAGE}: {line}", source.path);
            for label in cited {
                let known = defined.contains_key(&label);
                assert!(known, "{}:{number}: {label} is not defined in {PAGE}", source.path);
            }
        }
    }
}

#[test]
fn every_invariant_names_a_test_that_exists_or_is_cited_by_one() {
    let rust = others();
    for (label, statement) in invariants() {
        let tests = tests_in(&statement);
        for test in &tests {
            let exists = rust.iter().any(|source| holds(source, test));
            assert!(exists, "{PAGE}: {label} names the test {test}, which does not exist");
        }
        let cited =
            rust.iter().any(|source| is_test(source) && labels(&source.text).contains(&label));
        assert!(cited || !tests.is_empty(), "{PAGE}: {label} is held by no test");
    }
}

/// By the code, or by another invariant: one of the two statements names the other.
#[test]
fn every_invariant_is_relied_on() {
    let rust = others();
    let defined = invariants();
    for (label, statement) in &defined {
        let cites = |text: &str, label: &String| labels(text).contains(label);
        let by_code = rust.iter().any(|source| cites(&source.text, label));
        let by_another = defined.iter().any(|(other, statement_of_other)| {
            other != label && (cites(statement_of_other, label) || cites(statement, other))
        });
        assert!(by_code || by_another, "{PAGE}: nothing rests on {label}");
    }
}

#[test]
fn the_page_is_read_as_it_is_meant() {
    let page = "# Invariants\n\n- **AB-12** It holds,\n  always. Test: `room/tests/x.rs::it_holds`, `y::tests::so_does_this`.\n\
                - **C-3** And this: see `code`.\n\nMore.\n";
    let defined = parse(page);
    assert_eq!(defined.keys().collect::<Vec<_>>(), ["AB-12", "C-3"]);
    assert_eq!(
        tests_in(&defined["AB-12"]),
        ["room/tests/x.rs::it_holds", "y::tests::so_does_this"]
    );
    assert_eq!(tests_in(&defined["C-3"]), Vec::<String>::new());
    assert_eq!(labels("K-3 and AB-12: not UTF-, x-1 or A-b"), ["K-3", "AB-12"]);
}

/// Every file of Rust but this one.
fn others() -> Vec<Source> {
    let mut rust = sources::rust();
    rust.retain(|source| source.path != HERE);
    rust
}

/// The invariants of the page, by label.
fn invariants() -> BTreeMap<String, String> {
    let page = sources::texts().into_iter().find(|source| source.path == PAGE);
    let page =
        page.unwrap_or_else(|| panic!("{PAGE} defines the invariants that unsafe blocks cite"));
    let defined = parse(&page.text);
    assert!(
        !defined.is_empty(),
        "{PAGE} defines nothing in the form `- **K-1** statement. Test: ...`"
    );
    defined
}

fn parse(page: &str) -> BTreeMap<String, String> {
    let mut defined: BTreeMap<String, String> = BTreeMap::new();
    let mut open: Option<String> = None;
    for line in page.lines() {
        if let Some((label, rest)) =
            line.strip_prefix("- **").and_then(|rest| rest.split_once("**"))
        {
            let before = defined.insert(label.to_owned(), rest.trim().to_owned());
            assert_eq!(before, None, "{PAGE} defines {label} twice");
            open = Some(label.to_owned());
        } else if line.starts_with("  ") {
            if let Some(statement) = open.as_ref().and_then(|label| defined.get_mut(label)) {
                statement.push(' ');
                statement.push_str(line.trim());
            }
        } else {
            open = None;
        }
    }
    defined
}

/// The tests that a statement names: the words in backquotes after `Test:`.
fn tests_in(statement: &str) -> Vec<String> {
    let Some((_, named)) = statement.split_once("Test:") else { return Vec::new() };
    named.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Whether a file holds the test at `path`, such as
/// `kernels/src/disjoint/tests.rs::threads_fill_one_vector`.
fn holds(source: &Source, path: &str) -> bool {
    let (place, name) = path.rsplit_once("::").unwrap_or(("", path));
    let lies_there = place.split(['/', ':']).filter(|part| !part.is_empty()).all(|part| {
        let part = part.trim_end_matches(".rs");
        let in_path = source.path.trim_end_matches(".rs").split('/').any(|folder| folder == part);
        in_path || source.text.contains(&format!("mod {part}"))
    });
    lies_there && source.text.contains(&format!("fn {name}("))
}

fn is_test(source: &Source) -> bool {
    source.path.contains("/tests/") || source.path.ends_with("tests.rs")
}

/// The text of a comment after its marker, if it is one of safety.
fn safety_comment(line: &str) -> Option<&str> {
    line.trim_start().strip_prefix("// SAFETY:")
}

/// The labels in a text: capitals, a hyphen, digits.
fn labels(text: &str) -> Vec<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
    words.filter(|word| is_label(word)).map(str::to_owned).collect()
}

fn is_label(word: &str) -> bool {
    word.split_once('-').is_some_and(|(capitals, digits)| {
        let all =
            |text: &str, is: fn(&char) -> bool| !text.is_empty() && text.chars().all(|c| is(&c));
        all(capitals, char::is_ascii_uppercase) && all(digits, char::is_ascii_digit)
    })
}
