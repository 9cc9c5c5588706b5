//! Jobs that cannot be what they are started as.

use crate::Named;
use crate::faults::{folder, steps};
use crate::job::{has, mpirun, run, train_gpt};

pub(crate) const TRIALS: &[Named] = &[("starting::row_9_a_mesh_of_another_size", another_size)];

fn another_size() -> Result<(), String> {
    let out = folder()?;
    let mut command = mpirun();
    command.args(["-n", "4"]).arg(train_gpt()).args(["--comm", "mpi", "--mesh", "2x3"]);
    command.arg("--out").arg(out.path());
    let ended = run(command)?;
    has(&ended.err, &["mesh 2x3 has 6 ranks, and there are 4 processes"])?;
    match (ended.code, steps(out.path())) {
        (Some(2), 0) => Ok(()),
        other => Err(format!("exit code and steps are {other:?}: {}", ended.err)),
    }
}
