use super::*;

const GRACE: Duration = Duration::from_secs(10);

/// Returns a supervisor of three running ranks.
fn three() -> (Supervisor, Instant) {
    let now = Instant::now();
    let mut supervisor = Supervisor::new(3, GRACE, now);
    (0..3).for_each(|rank| assert!(supervisor.joined(rank).is_empty()));
    (supervisor, now)
}

fn signals(actions: &[LaunchAction]) -> Vec<(u32, i32)> {
    let signal = |action: &LaunchAction| match action {
        LaunchAction::Signal(rank, signal) => Some((*rank, *signal)),
        LaunchAction::KillStarted | LaunchAction::Say(_) => None,
    };
    actions.iter().filter_map(signal).collect()
}

#[test]
fn ranks_that_end_well_end_alone() {
    let (mut supervisor, now) = three();
    for rank in 0..3 {
        assert!(!supervisor.is_over());
        assert!(supervisor.ended(rank, ProcessEnd::Code(0), now).is_empty());
    }
    assert!(supervisor.is_over());
    assert_eq!((supervisor.first, supervisor.deadline()), (None, None));
    assert_eq!(supervisor.outcome(0).code(), 0);
}

#[test]
fn the_first_that_ends_badly_ends_the_others_and_is_remembered() {
    let (mut supervisor, now) = three();
    let actions = supervisor.ended(1, ProcessEnd::Code(3), now);
    assert_eq!(signals(&actions), [(0, TERM), (2, TERM)]);
    let said = "rank 1 ended with exit code 3; the others get SIGTERM, and SIGKILL after 10 s";
    assert_eq!(actions[0], LaunchAction::Say(said.to_owned()));
    assert!(supervisor.ended(2, ProcessEnd::Signal(TERM), now).is_empty());
    assert_eq!(supervisor.deadline(), Some(now + GRACE));
    assert_eq!(signals(&supervisor.late(now + GRACE)), [(0, KILL)]);
    assert_eq!(supervisor.first, Some(Bad::Rank(1, ProcessEnd::Code(3))));
    supervisor.ended(0, ProcessEnd::Signal(KILL), now + GRACE);
    assert!(supervisor.is_over());
}

#[test]
fn a_signal_is_passed_on_once_and_the_second_kills() {
    let (mut supervisor, now) = three();
    let int = Signal::SIGINT as i32;
    assert_eq!(signals(&supervisor.signal(int, now)), [(0, int), (1, int), (2, int)]);
    // A rank gets no other signal while it handles the first one.
    assert!(signals(&supervisor.ended(1, ProcessEnd::Signal(int), now)).is_empty());
    assert_eq!(supervisor.deadline(), Some(now + GRACE));
    assert_eq!(signals(&supervisor.signal(int, now)), [(0, KILL), (2, KILL)]);
    assert!(supervisor.signal(int, now).is_empty());
}

#[test]
fn a_signal_without_a_bad_end_sets_no_deadline() {
    let (mut supervisor, now) = three();
    supervisor.signal(TERM, now);
    supervisor.ended(0, ProcessEnd::Code(0), now);
    assert_eq!(supervisor.deadline(), None);
    assert_eq!(supervisor.signal, Some(TERM));
}

#[test]
fn who_comes_late_gets_what_it_has_missed() {
    let now = Instant::now();
    let mut supervisor = Supervisor::new(2, GRACE, now);
    supervisor.joined(0);
    supervisor.ended(0, ProcessEnd::Code(1), now);
    assert!(!supervisor.is_over() && supervisor.awaits(1));
    assert_eq!(supervisor.joined(1), [LaunchAction::Signal(1, TERM)]);
    let mut supervisor = Supervisor::new(2, GRACE, now);
    supervisor.signal(2, now);
    assert_eq!(supervisor.joined(1), [LaunchAction::Signal(1, 2)]);
}

#[test]
fn without_mpirun_nobody_else_comes() {
    let now = Instant::now();
    let mut supervisor = Supervisor::new(3, GRACE, now);
    supervisor.joined(2);
    assert_eq!(signals(&supervisor.alone(ProcessEnd::Code(0), now)), [(2, TERM)]);
    assert_eq!(supervisor.first, Some(Bad::StarterGone));
    assert!(!supervisor.is_over());
    supervisor.ended(2, ProcessEnd::Code(0), now);
    assert!(supervisor.is_over());
}

#[test]
fn what_is_not_gone_after_sigkill_is_given_up() {
    let (mut supervisor, now) = three();
    supervisor.ended(0, ProcessEnd::LOST, now);
    supervisor.late(now);
    let actions = supervisor.late(now);
    let said = LaunchAction::Say("gave up waiting for ranks 1, 2".to_owned());
    assert_eq!(actions, [LaunchAction::KillStarted, said]);
    assert!(supervisor.is_over());
}

#[test]
fn who_is_not_there_in_time_has_failed() {
    let now = Instant::now();
    let mut supervisor = Supervisor::new(3, GRACE, now);
    supervisor.joined(0);
    supervisor.joined(2);
    let due = supervisor.deadline().expect("one is missing");
    assert_eq!(due, now + START);
    assert_eq!(signals(&supervisor.late(due)), [(0, TERM), (2, TERM)]);
    let ended = supervisor.outcome(0);
    let told = ended.tell(0, Outlook::Last).expect("it failed");
    assert_eq!(told, "attempt 0 failed: rank 1 did not start within 120 s");
    assert_eq!(ended.code(), 1);
    supervisor.ended(0, ProcessEnd::Signal(TERM), due);
    supervisor.ended(2, ProcessEnd::Signal(TERM), due);
    // The rank may still start, so the supervisor waits. After that, the process that starts it is
    // killed.
    assert!(!supervisor.is_over());
    assert_eq!(supervisor.late(due + GRACE)[1], LaunchAction::KillStarted);
    assert!(supervisor.is_over());
}

#[test]
fn a_rank_that_never_starts_is_named_when_the_others_are_gone() {
    let now = Instant::now();
    let mut supervisor = Supervisor::new(2, GRACE, now);
    supervisor.joined(0);
    let due = now + START;
    assert_eq!(signals(&supervisor.late(due)), [(0, TERM)]);
    assert_eq!(signals(&supervisor.late(due + GRACE)), [(0, KILL)]);
    supervisor.ended(0, ProcessEnd::Signal(KILL), due + GRACE);
    assert!(!supervisor.is_over());
    let said = LaunchAction::Say("gave up waiting for rank 1".to_owned());
    assert_eq!(supervisor.late(due + GRACE + BURIAL), [LaunchAction::KillStarted, said]);
}

#[test]
fn an_interrupted_job_has_the_code_of_its_signal_unless_its_ranks_have_answered() {
    let (mut supervisor, now) = three();
    supervisor.signal(TERM, now);
    // They ignore both signals, and cannot be killed.
    supervisor.signal(TERM, now);
    supervisor.late(now + BURIAL);
    assert!(supervisor.is_over());
    let ended = supervisor.outcome(0);
    assert_eq!((ended.code(), ended.is_final()), (128 + 15, true));
    let told = ended.tell(0, Outlook::Again).expect("it is no success");
    assert_eq!(told, "attempt 0 was interrupted by SIGTERM");

    let (mut supervisor, now) = three();
    supervisor.signal(2, now);
    (0..3).for_each(|rank| assert!(supervisor.ended(rank, ProcessEnd::Code(0), now).is_empty()));
    // They have saved, and ended well. Nobody knows that if their lines are lost.
    assert_eq!(supervisor.outcome(0).code(), 0);
    assert_eq!(supervisor.outcome(1).code(), 128 + 2);
    let (supervisor, _) = three();
    assert_eq!(AttemptEnd { lost: 1, is_abandoned: false, ..supervisor.outcome(0) }.code(), 1);
}

#[test]
fn ranks_that_never_start_do_not_keep_a_job_that_gets_a_signal() {
    let now = Instant::now();
    let mut supervisor = Supervisor::new(2, GRACE, now);
    supervisor.joined(0);
    supervisor.signal(1, now);
    assert_eq!(supervisor.deadline(), Some(now + GRACE));
    supervisor.ended(0, ProcessEnd::Code(0), now);
    let actions = supervisor.late(now + GRACE);
    let said = "rank 1 has not started: SIGKILL for the processes that start the ranks";
    assert_eq!(actions, [LaunchAction::Say(said.to_owned()), LaunchAction::KillStarted]);
    assert!(supervisor.is_over());
    let ended = supervisor.outcome(0);
    assert_eq!(ended.code(), 128 + 1);
    let told = ended.tell(0, Outlook::Last).expect("it is no success");
    assert_eq!(told, "attempt 0 was interrupted by SIGHUP: rank 1 had not started");
}

#[test]
fn lines_wait_for_their_reader_until_the_job_is_being_ended() {
    let (mut supervisor, now) = three();
    let second = Duration::from_secs(1);
    assert_eq!(supervisor.lines_until(now, None), None);
    assert_eq!(supervisor.lines_until(now, Some(now)), None);
    supervisor.signal(TERM, now);
    // Ranks may take their time after a signal, and a reader that reads meanwhile gets all lines.
    assert_eq!(supervisor.lines_until(now, None), Some(now + GRACE));
    assert_eq!(supervisor.lines_until(now + second, None), Some(now + second + GRACE));
    // The grace period begins with the end of the last rank, even if the reader is slow.
    let over = now + 5 * second;
    assert_eq!(supervisor.lines_until(over + second, Some(over)), Some(over + GRACE));
    supervisor.signal(TERM, over);
    assert_eq!(supervisor.lines_until(over, Some(over)), Some(over + LAST_LINES));
}

#[test]
fn a_grace_of_zero_leaves_a_second_for_the_last_lines() {
    let now = Instant::now();
    let mut supervisor = Supervisor::new(1, Duration::ZERO, now);
    supervisor.joined(0);
    supervisor.signal(TERM, now);
    assert_eq!(supervisor.lines_until(now, None), Some(now + LAST_LINES));
    supervisor.ended(0, ProcessEnd::Code(1), now);
    assert_eq!(supervisor.lines_until(now, Some(now)), Some(now + LAST_LINES));
}

#[test]
fn a_signal_after_the_end_of_all_ranks_is_for_their_lines() {
    let (mut supervisor, now) = three();
    (0..3).for_each(|rank| assert!(supervisor.ended(rank, ProcessEnd::Code(0), now).is_empty()));
    let said = "SIGTERM: all ranks have ended; lines that are not read within 10 s are lost";
    assert_eq!(supervisor.signal(TERM, now), [LaunchAction::Say(said.to_owned())]);
    assert!(supervisor.signal(TERM, now).is_empty());
}
