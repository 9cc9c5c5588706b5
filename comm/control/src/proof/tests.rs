use super::*;

fn hello() -> Hello {
    Hello {
        protocol: 1,
        job: "job".to_owned(),
        start: 7,
        rank: 1,
        world: 4,
        build: "build".to_owned(),
        config: 9,
        host: "host".to_owned(),
        pid: 12,
        nonce: Bytes::from_static(&[3; TAG]),
    }
}

fn secret() -> Secret {
    Secret::from_bytes([1; 32])
}

/// Values from Python's `hmac`: `hmac.new(bytes([1]) * 32, label + transcript, "sha256")`, the transcript made with
/// `struct.pack(">Q", len(part)) + part` of each part.
#[test]
fn a_proof_is_what_another_implementation_makes() {
    let transcript = Transcript::new(&hello(), &[4; TAG]);
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let expected = "bb273285b649c4a325196049f0e62de999c6b8841ef78cf9e30d9e88a2db02bd";
    assert_eq!(hex(&transcript.proof(&secret(), Side::Member)), expected);
}

#[test]
fn a_proof_holds_for_what_was_said_and_for_nothing_else() {
    let transcript = Transcript::new(&hello(), &[4; TAG]);
    let proof = transcript.proof(&secret(), Side::Member);
    assert!(transcript.is_proved(&secret(), Side::Member, &proof));
    assert!(!transcript.is_proved(&secret(), Side::Coordinator, &proof), "it was sent back");
    assert!(!transcript.is_proved(&Secret::from_bytes([2; 32]), Side::Member, &proof));
    assert!(!transcript.is_proved(&secret(), Side::Member, &proof[..31]));
    assert!(!transcript.is_proved(&secret(), Side::Member, &[]));
    let others = [
        Hello { protocol: 2, ..hello() },
        Hello { job: "jo".to_owned(), ..hello() },
        Hello { start: 8, ..hello() },
        Hello { rank: 2, ..hello() },
        Hello { world: 5, ..hello() },
        Hello { build: "buildh".to_owned(), host: "ost".to_owned(), ..hello() },
        Hello { config: 10, ..hello() },
        Hello { host: "ghost".to_owned(), ..hello() },
        Hello { pid: 13, ..hello() },
        Hello { nonce: Bytes::from_static(&[5; TAG]), ..hello() },
    ];
    for other in others {
        let transcript = Transcript::new(&other, &[4; TAG]);
        assert!(!transcript.is_proved(&secret(), Side::Member, &proof), "{other:?}");
    }
    let later = Transcript::new(&hello(), &[6; TAG]);
    assert!(!later.is_proved(&secret(), Side::Member, &proof), "another challenge");
}

#[test]
fn a_seal_is_taken_once_and_in_its_turn() {
    let transcript = Transcript::new(&hello(), &[4; TAG]);
    let mut member = transcript.seals(&secret(), Side::Member);
    let first = member.seal(b"first".to_vec());
    let second = member.seal(b"second".to_vec());

    let mut open = transcript.seals(&secret(), Side::Member);
    assert!(open.open(second.clone()).is_none(), "out of turn");
    assert_eq!(open.open(first.clone()).expect("in turn"), "first");
    assert!(open.open(first).is_none(), "a second time");
    let changed = Sealed { letter: Bytes::from_static(b"seconD"), ..second.clone() };
    assert!(open.open(changed).is_none());
    assert_eq!(open.open(second.clone()).expect("in turn"), "second");
    let mut other = transcript.seals(&secret(), Side::Coordinator);
    let _ = other.seal(Vec::new());
    assert!(other.open(second).is_none(), "sent back");
}
