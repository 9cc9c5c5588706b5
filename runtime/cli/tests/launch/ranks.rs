//! The environment of ranks.

use std::collections::BTreeSet;

use crate::job::{NCCL, command, ran};
use crate::program::output;

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

/// The launcher runs in a step of Slurm, beside the settings of another job.
#[test]
fn the_place_and_the_meeting_of_another_job_do_not_reach_the_ranks() {
    const OTHER: [&str; 15] = [
        "HSDP_JOB_SECRET_FILE",
        "HSDP_CONTROL_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALNRANKS",
        "MPI_LOCALRANKID",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_LOCALID",
    ];
    let mut job = command(&["launch", "--comm", "nccl", "-n", "1", "--", "env"]);
    job.envs(OTHER.map(|name| (name, "1"))).env("SLURM_JOB_ID", "7").env("WORLD_SIZE", "5");
    let (code, said, _) = output(&mut job);
    let names: Vec<&str> = said
        .lines()
        .filter_map(|line| line.strip_prefix("[0] ")?.split_once('='))
        .map(|it| it.0)
        .collect();
    let left: Vec<&str> = OTHER.into_iter().filter(|name| names.contains(name)).collect();
    assert_eq!((code, left), (Some(0), Vec::new()));
    assert!(names.contains(&"SLURM_JOB_ID") && said.contains("[0] WORLD_SIZE=1\n"), "{said}");
}

/// Every user of the machine could read a secret in a command line.
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
