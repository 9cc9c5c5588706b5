//! Checks the user at the other end of a socket.

use std::io;
use std::os::unix::net::UnixStream;

use nix::unistd::Uid;

/// Refuses a connection of another user, because a process that may send frames or orders can end
/// the job's processes.
///
/// # Errors
/// `PermissionDenied`, with both users; the error of the system.
pub(super) fn check(stream: &UnixStream) -> io::Result<()> {
    let (other, own) = (user(stream)?, Uid::effective());
    if other == own {
        return Ok(());
    }
    let text =
        format!("its other end is a process of user {other}, and this process runs as user {own}");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn user(stream: &UnixStream) -> io::Result<Uid> {
    use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

    Ok(Uid::from_raw(getsockopt(stream, PeerCredentials)?.uid()))
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn user(stream: &UnixStream) -> io::Result<Uid> {
    Ok(nix::unistd::getpeereid(stream)?.0)
}
