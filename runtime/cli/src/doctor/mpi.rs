//! Finds MPI by its `mpirun`.

use super::{Finding, State};
use crate::mpirun::{ADVICE, Family, Mpirun};

const KEY: &str = "mpi";
const WHAT: &str = "MPI";

/// Reports the `mpirun` in PATH.
pub(super) fn find() -> Finding {
    let Mpirun { path, family, version } = match Mpirun::find() {
        Ok(Some(mpirun)) => mpirun,
        Ok(None) => {
            let said = "no mpirun in PATH".to_owned();
            return Finding::missing(KEY, WHAT, said, &format!("{ADVICE}, for the feature mpi"));
        }
        Err(said) => return Finding { said: Some(said), ..Finding::note(KEY, WHAT) },
    };
    let version = version.map(|version| match family {
        Family::Other => version,
        family => format!("{} {version}", family.name()),
    });
    let said = match family {
        Family::Other => Some("its --version names neither Open MPI nor MPICH".to_owned()),
        Family::OpenMpi | Family::Hydra => None,
    };
    Finding { state: State::Found, version, path: Some(path), said, ..Finding::note(KEY, WHAT) }
}
