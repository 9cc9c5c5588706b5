use super::*;

/// The place that an environment of these variables gives.
fn told(variables: &[(&str, &str)]) -> Result<Option<Launched>, String> {
    let variable = |name: &'static str| {
        let set = variables.iter().find(|(variable, _)| *variable == name);
        Ok(set.map(|(_, value)| (*value).to_owned()))
    };
    Launched::told(&variable).map_err(|error| error.to_string())
}

fn launched(launcher: Launcher, rank: usize, size: usize, here: [Option<usize>; 2]) -> Launched {
    let [size_here, rank_here] = here;
    Launched { launcher, rank: Rank::new(rank), size, size_here, rank_here }
}

#[test]
fn nobody_has_started_a_lone_process() {
    assert_eq!(told(&[]), Ok(None));
    assert!(World::from_env().is_ok_and(|world| world.size() == 1));
}

#[test]
fn each_launcher_is_understood() {
    let open_mpi = [
        ("OMPI_COMM_WORLD_RANK", "3"),
        ("OMPI_COMM_WORLD_SIZE", "8"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "3"),
        ("PMIX_RANK", "3"),
    ];
    assert_eq!(told(&open_mpi), Ok(Some(launched(Launcher::OpenMpi, 3, 8, [Some(4), Some(3)]))));
    let mpich =
        [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALNRANKS", "2"), ("MPI_LOCALRANKID", "1")];
    assert_eq!(told(&mpich), Ok(Some(launched(Launcher::Pmi, 1, 2, [Some(2), Some(1)]))));
    let slurm = [
        ("SLURM_PROCID", "5"),
        ("SLURM_STEP_NUM_TASKS", "6"),
        ("SLURM_NTASKS", "6"),
        ("SLURM_LOCALID", "1"),
    ];
    assert_eq!(told(&slurm), Ok(Some(launched(Launcher::Slurm, 5, 6, [None, Some(1)]))));
    let pmi_of_slurm = [[("PMI_RANK", "5"), ("PMI_SIZE", "6")].as_slice(), &slurm].concat();
    assert_eq!(told(&pmi_of_slurm), Ok(Some(launched(Launcher::Pmi, 5, 6, [None, Some(1)]))));
    let torchrun =
        [("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "1"), ("LOCAL_RANK", "0")];
    assert_eq!(told(&torchrun), Ok(Some(launched(Launcher::Torchrun, 1, 2, [Some(1), Some(0)]))));
}

#[test]
fn the_script_of_a_job_is_not_its_tasks() {
    let script = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "16")];
    assert!(told(&script).is_ok_and(|told| told.is_none_or(|told| told.size == 1)));
    let mpirun = [
        ("SLURM_PROCID", "0"),
        ("SLURM_STEP_NUM_TASKS", "2"),
        ("OMPI_COMM_WORLD_RANK", "7"),
        ("OMPI_COMM_WORLD_SIZE", "16"),
    ];
    assert_eq!(told(&mpirun), Ok(Some(launched(Launcher::OpenMpi, 7, 16, [None, None]))));
}

#[test]
fn an_agent_of_torchrun_in_a_task_of_slurm_is_not_its_ranks() {
    let slurm = [("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_LOCALID", "0")];
    let pmi = [("PMI_RANK", "1"), ("PMI_SIZE", "4")];
    let ranks =
        [("RANK", "9"), ("WORLD_SIZE", "32"), ("LOCAL_WORLD_SIZE", "8"), ("LOCAL_RANK", "1")];
    let expected = Ok(Some(launched(Launcher::Torchrun, 9, 32, [Some(8), Some(1)])));
    let marker = [("TORCHELASTIC_RUN_ID", "none")];
    assert_eq!(told(&[&slurm[..], &ranks, &marker].concat()), expected);
    assert_eq!(told(&[&slurm[..], &pmi, &ranks, &marker].concat()), expected);
    // That `mpirun` is inside the task, so its ranks are not those of `RANK`.
    let mpirun = [("PMI_RANK", "3"), ("PMI_SIZE", "8")];
    let refused = "PMI_RANK=3: rank 3 of 8, and RANK says rank 9 of 32";
    let all = [&slurm[..], &mpirun, &ranks, &marker].concat();
    assert_eq!(told(&all), Err(refused.to_owned()));
    // One process on each machine has the numbers of its task.
    let alone = [("RANK", "1"), ("WORLD_SIZE", "4"), marker[0]];
    let expected = Ok(Some(launched(Launcher::Torchrun, 1, 4, [None, None])));
    assert_eq!(told(&[&slurm[..], &pmi, &alone].concat()), expected);
    let refused = "SLURM_PROCID=1: rank 1 of 4, and RANK says rank 9 of 32";
    assert_eq!(told(&[&slurm[..], &ranks].concat()), Err(refused.to_owned()));
}

#[test]
fn contradictions_are_refused_with_both_sides() {
    let two = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("RANK", "2"),
        ("WORLD_SIZE", "4"),
    ];
    let refused = "OMPI_COMM_WORLD_RANK=1: rank 1 of 4, and RANK says rank 2 of 4";
    assert_eq!(told(&two), Err(refused.to_owned()));
    let cases: [(&[(&str, &str)], &str); 7] = [
        (
            &[("RANK", "4"), ("WORLD_SIZE", "4")],
            "RANK=4: ranks of a world of 4 are numbered from 0 to 3",
        ),
        (&[("RANK", "1")], "RANK=1: WORLD_SIZE is not set"),
        (&[("WORLD_SIZE", "4")], "WORLD_SIZE=4: RANK is not set"),
        (&[("RANK", "0"), ("WORLD_SIZE", "0")], "WORLD_SIZE=0: a world has at least 1 rank"),
        (
            &[("RANK", "first"), ("WORLD_SIZE", "1")],
            "RANK=first: not a number of ranks: invalid digit",
        ),
        (
            &[("PMI_RANK", "0"), ("PMI_SIZE", "-1")],
            "PMI_SIZE=-1: not a number of ranks: invalid digit",
        ),
        (&[("RANK", "0"), ("WORLD_SIZE", "")], "WORLD_SIZE=: not a number of ranks: cannot parse"),
    ];
    for (variables, expected) in cases {
        let refused = told(variables).expect_err("refused");
        assert!(refused.starts_with(expected), "{refused}");
    }
}

#[test]
fn the_shards_of_a_replica_are_on_one_machine() {
    let mesh = |size, here| {
        let launched = launched(Launcher::OpenMpi, 0, size, [here, None]);
        launched.mesh().map(|it| it.to_string())
    };
    assert_eq!(mesh(32, Some(8)), Ok("4x8".to_owned()));
    assert_eq!(mesh(8, Some(8)), Ok("1x8".to_owned()));
    assert_eq!(mesh(6, None), Ok("1x6".to_owned()));
    assert_eq!(mesh(6, Some(4)), Ok("1x6".to_owned()), "the machines have not as many each");
}

#[test]
#[cfg(not(feature = "nccl"))]
fn processes_of_torchrun_are_told_what_to_start() {
    let refused = of_processes(&launched(Launcher::Torchrun, 0, 4, [None, None]));
    let refused = refused.map(drop).expect_err("they have no MPI").to_string();
    assert!(refused.starts_with("WORLD_SIZE=4: processes on CPUs need MPI"), "{refused}");
    assert!(refused.contains("mpirun -n 4"), "{refused}");
}
