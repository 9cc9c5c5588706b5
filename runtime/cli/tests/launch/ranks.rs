//! The environment of ranks.

use std::collections::BTreeSet;

use crate::job::{NCCL, ran};

#[test]
fn each_rank_has_its_place_and_all_the_same_meeting() {
    let script = r#"echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $HSDP_RESTART $MASTER_ADDR $MASTER_PORT $HSDP_JOB_SECRET $HSDP_LAUNCH_SOCKET$HSDP_LAUNCH_RANK.""#;
    let (code, said, told) = ran(&[&NCCL[..], &["-n", "3"]].concat(), script);
    assert_eq!((code, &*told), (Some(0), ""));
    let mut lines: Vec<Vec<&str>> = said.lines().map(|line| line.split(' ').collect()).collect();
    lines.sort();
    assert_eq!(lines.len(), 3);
    for (rank, line) in lines.iter().enumerate() {
        let rank = rank.to_string();
        let expected = [&*format!("[{rank}]"), &rank, &rank, "3", "3", "0", "127.0.0.1"];
        assert_eq!(line[..7], expected);
        assert!(line[7].parse::<u16>().is_ok_and(|port| port > 0), "{line:?}");
        assert!(line[8].len() == 64 && line[8].chars().all(|it| it.is_ascii_hexdigit()));
        assert_eq!(line[9], ".", "ranks do not get the launcher's own variables");
    }
    let meetings: BTreeSet<_> = lines.iter().map(|line| (line[7], line[8])).collect();
    assert_eq!(meetings.len(), 1);
}

/// Every user of the machine could read a secret in a command line.
#[cfg(target_os = "linux")]
#[test]
fn the_secret_is_in_no_command_line_and_new_for_each_job() {
    let script = r#"echo "$HSDP_JOB_SECRET"; cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' ' ' | awk 'index($0, ENVIRON["HSDP_JOB_SECRET"]) { n++ } END { print n + 0 }'"#;
    let secrets = [(); 2].map(|()| {
        let (_, said, _) = ran(&[&NCCL[..], &["-n", "1"]].concat(), script);
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines[1], "[0] 0", "it is in a command line");
        lines[0].to_owned()
    });
    assert_ne!(secrets[0], secrets[1]);
}

#[test]
fn stdin_is_empty() {
    let (code, said, _) = ran(&[&NCCL[..], &["-n", "1"]].concat(), "cat; echo end");
    assert_eq!((code, &*said), (Some(0), "[0] end\n"));
}
