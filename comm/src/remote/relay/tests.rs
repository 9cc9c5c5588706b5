use super::*;
use crate::Descriptor;
use crate::call::barrier_of;
use crate::remote::header::bytes;
use crate::remote::message::MessageKind;

const KEY: ExchangeKey = ExchangeKey { epoch: 0, number: 0 };

fn relay(rank: usize, size: usize) -> Relay {
    Relay::new(Tree::new(Rank::new(rank), size))
}

/// The message of any rank of so many to the exchange of this number.
fn contribution(size: usize, number: u64) -> Arc<RankMessage> {
    let descriptor = Arc::new(Descriptor {
        channel: Channel::Control,
        sequence: number,
        op: Op::AllGather,
        ..barrier_of(relay(0, size).group)
    });
    let header = DataHeader { descriptor, step: 0, form: Default::default() };
    let header = bytes(&header);
    Arc::new(RankMessage::write(&Arc::default(), MessageKind::Data, 0, &header, 0).expect("memory"))
}

/// A message of a rank below, with contributions of these ranks.
fn batch(size: usize, key: ExchangeKey, ranks: &[usize]) -> RankMessage {
    let one = |rank: &usize| {
        let message = contribution(size, 0);
        let rank = Rank::new(*rank);
        let header = message.header().into();
        Forwarded { rank, header, payload: Payload::part(&message, 0..0) }
    };
    let contributions = ranks.iter().map(one).collect();
    ExchangeBatch { key, contributions }.write(&Arc::default()).expect("there is memory")
}

fn last(kind: MessageKind, exchanged: u64) -> RankMessage {
    let message = RankMessage::write(&Arc::default(), kind, 0, &[], 0).expect("memory");
    message.after(exchanged)
}

/// The messages that are taken in: the ranks, and whether it is a contribution, a problem or a last message.
fn come(relay: &mut Relay) -> Vec<(usize, &'static str)> {
    let what = |come: &Come| match come {
        Come::Forwarded(Ok(_)) => "contribution",
        Come::Forwarded(Err(_)) => "problem",
        Come::Last(_) => "last",
    };
    std::iter::from_fn(|| relay.come.pop_front())
        .map(|(rank, come)| (rank.index(), what(&come)))
        .collect()
}

#[test]
fn a_last_message_follows_the_contributions_before_it() {
    let mut leaf = relay(2, 3);
    assert!(!leaf.is_in_order(Rank::new(1), 1));
    leaf.hold_back(Rank::new(1), last(MessageKind::Left, 1));
    leaf.receive(Rank::new(0), batch(3, KEY, &[0, 1])).expect("it is from above");
    assert_eq!(come(&mut leaf), [(0, "contribution"), (1, "contribution"), (1, "last")]);
    assert!(leaf.is_in_order(Rank::new(1), 1) && leaf.held_back.is_empty());
}

#[test]
fn a_last_message_waits_no_longer_than_for_a_moment_when_a_rank_on_its_way_leaves() {
    let mut leaf = relay(2, 3);
    leaf.hold_back(Rank::new(1), last(MessageKind::Stop, 1));
    leaf.held_back[0].0 = Instant::now().checked_sub(PATIENCE).expect("not so early");
    leaf.look_for_overdue();
    assert_eq!(come(&mut leaf), [], "what is late may come");
    leaf.hear_that_leaves(Rank::new(0));
    leaf.look_for_overdue();
    assert_eq!(come(&mut leaf), [(1, "last")]);
    leaf.hold_back(Rank::new(1), last(MessageKind::Stop, 1));
    leaf.look_for_overdue();
    assert_eq!(come(&mut leaf), [], "it has just come");
}

#[test]
fn a_rank_that_contributes_twice_is_named() {
    let mut root = relay(0, 3);
    root.receive(Rank::new(1), batch(3, KEY, &[1])).expect("it is from below");
    root.receive(Rank::new(1), batch(3, KEY, &[1])).expect("the batch is well formed");
    assert_eq!(come(&mut root), [(1, "problem")]);
    root.receive(Rank::new(2), batch(3, KEY, &[2])).expect("it is from below");
    assert_eq!(come(&mut root), [], "this rank is still missing");
    root.contribute(KEY, &contribution(3, 0));
    assert_eq!(come(&mut root), [(1, "contribution"), (2, "contribution")]);
}

#[test]
fn a_contribution_to_another_exchange_is_a_problem_of_its_rank() {
    let mut leaf = relay(1, 3);
    let other = ExchangeKey { number: 7, ..KEY };
    leaf.receive(Rank::new(0), batch(3, other, &[2])).expect("the batch is well formed");
    assert_eq!(come(&mut leaf), [(2, "problem")]);
}

#[test]
fn contributions_come_from_above_or_from_below_and_no_other_way() {
    let mut relay = relay(1, 40);
    let refused = relay.receive(Rank::new(2), batch(40, KEY, &[2])).unwrap_err();
    assert_eq!(refused, "it has contributions, and its sender has none for this rank");
    let refused = relay.receive(Rank::new(33), batch(40, KEY, &[34])).unwrap_err();
    assert_eq!(refused, "it has a contribution of rank 34, which is elsewhere");
    assert!(relay.receive(Rank::new(33), batch(40, KEY, &[33])).is_ok());
}

#[test]
fn messages_are_counted_for_the_rank_and_for_others() {
    let mut root = relay(0, 3);
    for rank in [1, 2] {
        root.receive(Rank::new(rank), batch(3, KEY, &[rank])).expect("it is from below");
    }
    root.contribute(KEY, &contribution(3, 0));
    assert_eq!(root.messages, Messages { forwarded: 4, ..Messages::default() });
    let mut leaf = relay(1, 3);
    leaf.contribute(KEY, &contribution(3, 0));
    leaf.receive(Rank::new(0), batch(3, KEY, &[1])).expect("an early batch");
    leaf.receive(Rank::new(0), batch(3, KEY, &[0, 2])).expect("the rest");
    assert_eq!(leaf.messages, Messages { control: 2, background: 1, ..Messages::default() });
}
