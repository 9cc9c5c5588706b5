use proptest::prelude::*;

use super::*;
use crate::fuzzing::MessageKind;
use crate::remote::BufferPool;

fn message(bytes: usize) -> Arc<RankMessage> {
    let pool = Arc::<BufferPool>::default();
    let mut message =
        RankMessage::write(&pool, MessageKind::Data, 0, b"header", bytes).expect("memory");
    message.body_mut().iter_mut().zip(0_u32..).for_each(|(byte, at)| *byte = at.to_le_bytes()[0]);
    Arc::new(message)
}

/// Everything that may go from one to the other.
fn carry(from: &mut Passage, to: &mut Passage, came: &mut Vec<Came>) -> usize {
    let mut pieces = 0;
    while let Some((taken, next)) = from.next() {
        let piece = next.map_or_else(Bytes::new, |next| next.piece());
        came.extend(to.take(taken, &piece).expect("in order"));
        pieces += 1;
    }
    pieces
}

#[test]
fn messages_come_whole_and_in_order_and_no_more_than_may_be_are_under_way() {
    for kept in [3, 4, 5, 17, 129] {
        let mut one = Passage::new(kept);
        let mut other = Passage::new(kept);
        let sent: Vec<_> =
            [0, 1, 300_000, 64, MOST_PIECE, 2 * MOST_PIECE].into_iter().map(message).collect();
        let worlds = || [7, 7, 0, 7, 1, 1];
        sent.iter().zip(worlds()).for_each(|(message, world)| one.send(world, Arc::clone(message)));
        let mut came = Vec::new();
        let mut back = Vec::new();
        for _ in 0..100 {
            assert!(carry(&mut one, &mut other, &mut came) <= kept - 2, "{kept}");
            assert!(carry(&mut other, &mut one, &mut back) <= 2);
        }
        assert!([0, 1, 7].iter().all(|world| one.under_way(*world) + other.under_way(*world) == 0));
        assert!(back.is_empty());
        let sent = worlds().into_iter().zip(&sent);
        let sent: Vec<_> =
            sent.map(|(world, message)| (world, message.bytes().to_vec().into())).collect();
        assert!(came == sent, "{kept}");
    }
}

#[test]
fn counts_go_around() {
    let mut one = Passage::new(4);
    let mut other = Passage::new(4);
    for it in [&mut one, &mut other] {
        (it.sent, it.taken, it.came, it.told) = (u32::MAX, u32::MAX, u32::MAX, u32::MAX);
    }
    let mut came = Vec::new();
    for _ in 0..10 {
        one.send(0, message(100));
        carry(&mut one, &mut other, &mut came);
        carry(&mut other, &mut one, &mut Vec::new());
    }
    assert_eq!((came.len(), one.sent), (10, 9));
}

/// A piece of message 1, as it travels.
fn piece(world: u32, bytes: u64, offset: u64, part: &'static [u8]) -> Bytes {
    let head = [&world.to_le_bytes()[..], &bytes.to_le_bytes(), &offset.to_le_bytes()];
    [&head.concat(), part].concat().into()
}

#[test]
fn what_does_not_follow_is_refused() {
    let refused =
        |taken, piece| Passage::new(9).take(taken, &piece).expect_err("it does not follow");
    let part = &[1; 4];
    let told = refused(0, piece(1, 10, 4, part));
    assert_eq!(
        told,
        "a piece at offset 4 of a message of 10 bytes in world 1, but the next expected byte is 0 of 10 in world 1"
    );
    let mut passage = Passage::new(9);
    assert_eq!(passage.take(0, &piece(1, 10, 0, part)), Ok(None));
    for other in [piece(1, 11, 4, part), piece(2, 10, 4, part), piece(1, 4, 0, part)] {
        let told = passage.take(0, &other).expect_err("it is of another message");
        assert!(told.ends_with("the next expected byte is 4 of 10 in world 1"), "{told}");
    }
    let told = refused(1, piece(1, 10, 0, part));
    assert_eq!(told, "it acknowledges 1 pieces, but 0 were sent");
    let told = refused(0, piece(1, 10, 7, part));
    assert_eq!(told, "a piece of 4 bytes at offset 7 of a message of 10 bytes");
    let told = refused(0, piece(1, u64::MAX, u64::MAX, part));
    assert!(told.starts_with("a piece of 4 bytes at offset 18446744073709551615 of"), "{told}");
    let told = refused(0, piece(1, 10, 0, &[]));
    assert_eq!(told, "a piece of 0 bytes at offset 0 of a message of 10 bytes");
    assert_eq!(refused(0, vec![0; HEAD - 1].into()), "a piece without a head");
}

proptest! {
    #[test]
    fn pieces_that_may_be_anything_are_taken_or_refused(
        pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..64), 0..8)
    ) {
        let mut passage = Passage::new(9);
let mut bytes = 0;
        for piece in pieces {
            bytes += piece.len();
            let _ = passage.take(0, &piece.into());
            let held = passage.coming.as_ref().map_or(0, |coming| coming.came.capacity());
            prop_assert!(held <= 2 * bytes + 8);
        }
    }
}
