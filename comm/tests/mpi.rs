//! A program that has initialized MPI itself. MPI is initialized once in a process, so this is one test, and a program of its own.

use std::ptr;
use std::time::Duration;

use hsdp_comm::mpi::{Job, MpiError};

#[test]
fn a_program_that_has_begun_mpi_for_fewer_threads_is_refused() {
    // SAFETY: MP-2, they are constants, written before the program began.
    let (needed, multiple) =
        unsafe { (mpi_sys::RSMPI_THREAD_SERIALIZED, mpi_sys::RSMPI_THREAD_MULTIPLE) };
    let mut provided = 0;
    let none = ptr::null_mut();
    // SAFETY: MP-2, it was not begun before, and no arguments are passed.
    let code =
        unsafe { mpi_sys::MPI_Init_thread(ptr::null_mut(), none, needed, &raw mut provided) };
    assert_eq!(code, 0);
    assert_ne!(
        provided, multiple,
        "a library that provides more than is asked for refuses nothing"
    );
    let refused = Job::join(Duration::from_secs(60)).expect_err("its calls would race");
    let [provided, needed] = ["MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE"];
    assert_eq!(refused, MpiError::ProgramThreads { provided, needed });
    let said = "the program has initialized MPI with MPI_THREAD_SERIALIZED, but MPI_THREAD_MULTIPLE is needed: ";
    assert!(refused.to_string().starts_with(said), "{refused}");
    // SAFETY: MP-2, it was begun, and nothing is under way.
    assert_eq!(unsafe { mpi_sys::MPI_Finalize() }, 0);
}
