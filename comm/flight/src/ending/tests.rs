use super::*;

#[test]
fn what_was_written_is_read() {
    let [complete, failed] = [Ending::default(), Ending::default()];
    assert!(!complete.is_written() && complete.read().is_none());
    complete.write(FlightState::Complete, 0);
    failed.write(FlightState::Failed, u64::MAX >> STATE_BITS);
    assert!(complete.is_written() && failed.is_written());
    assert_eq!(complete.read(), Some((FlightState::Complete, 0)));
    assert_eq!(failed.read(), Some((FlightState::Failed, u64::MAX >> STATE_BITS)));
}
