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
    assert_eq!(hex(&transcript.proof(&secret(), &MEMBER)), expected);
}

#[test]
fn a_proof_holds_for_what_was_said_and_for_nothing_else() {
    let transcript = Transcript::new(&hello(), &[4; TAG]);
    let proof = transcript.proof(&secret(), &MEMBER);
    assert!(transcript.is_proved(&secret(), &MEMBER, &proof));
    assert!(!transcript.is_proved(&secret(), &COORDINATOR, &proof), "it was sent back");
    assert!(!transcript.is_proved(&Secret::from_bytes([2; 32]), &MEMBER, &proof));
    assert!(!transcript.is_proved(&secret(), &MEMBER, &proof[..31]));
    assert!(!transcript.is_proved(&secret(), &MEMBER, &[]));
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
        assert!(!transcript.is_proved(&secret(), &MEMBER, &proof), "{other:?}");
    }
    let later = Transcript::new(&hello(), &[6; TAG]);
    assert!(!later.is_proved(&secret(), &MEMBER, &proof), "another challenge");
}

#[test]
fn a_mac_is_taken_once_and_in_its_turn() {
    let transcript = Transcript::new(&hello(), &[4; TAG]);
    let mut member = transcript.macs(&secret(), &MEMBER);
    let first = member.sign(b"first".to_vec(), Body::default());
    let body = Body::from(Bytes::from_static(b"a body"));
    let second = member.sign(b"second".to_vec(), body.clone());

    let mut received = transcript.macs(&secret(), &MEMBER);
    assert!(received.verify(second.clone()).is_none(), "out of turn");
    assert_eq!(received.verify(first.clone()).expect("in turn").0, "first");
    assert!(received.verify(first).is_none(), "a second time");
    let changed = Authenticated { message: Bytes::from_static(b"seconD"), ..second.clone() };
    assert!(received.verify(changed).is_none());
    let changed = Authenticated { body: Bytes::from_static(b"a bodY"), ..second.clone() };
    assert!(received.verify(changed).is_none());
    let (message, with) = received.verify(second.clone()).expect("in turn");
    assert_eq!((&*message, with), (&b"second"[..], body));
    let mut other = transcript.macs(&secret(), &COORDINATOR);
    let _ = other.sign(Vec::new(), Body::default());
    assert!(other.verify(second).is_none(), "sent back");
}
