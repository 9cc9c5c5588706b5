use prost::Message as _;

use super::*;
use crate::Secret;
use crate::limits::{MOST_FRAME, MOST_RANKS};
use crate::proof::{MEMBER, Transcript};
use crate::wire::Hello;

/// A member without a connection, and the messages that it sends.
fn member(world: u32) -> (Membership, mpsc::UnboundedReceiver<FromMember>) {
    let ends = Ends { rank: Rank::new(0), server: ([127, 0, 0, 1], 1).into() };
    let (messages, sent) = mpsc::unbounded_channel();
    let shared = Arc::new(Shared::new(world));
    let messages = Some(messages);
    let thread = None;
    let farewell = Duration::ZERO;
    (Membership { ends, world, farewell, shared, messages, thread }, sent)
}

#[test]
fn the_longest_message_to_all_ranks_of_the_largest_world_goes_in_frames_that_pass() {
    let (member, mut sent) = member(MOST_RANKS);
    let to: Vec<_> = (0..MOST_RANKS as usize).map(|rank| (Rank::new(rank), u32::MAX)).collect();
    let message = Bytes::from(vec![7; MOST_MESSAGE]);
    member.pass(&to, message.clone()).expect("it is sent");
    let transcript = Transcript::new(&Hello::default(), &[]);
    let mut macs = transcript.macs(&Secret::from_bytes([1; 32]), &MEMBER);
    let mut came = Vec::new();
    while let Ok(one) = sent.try_recv() {
        let FromMember::Pass(receivers, body) = &one else { panic!("{one:?}") };
        assert_eq!(body.bytes, message);
        came.extend(receivers.clone());
        let bytes = macs.frame(one).encoded_len();
        assert!(bytes <= MOST_FRAME, "{bytes}");
    }
    assert!(came == to, "each receiver once, in order: {} of {}", came.len(), to.len());
}
