//! Addresses of coordinators that are yet to start.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

/// A port that is free now, of an IP address of its own. Connections begin at 127.0.0.1, where other tests listen, too, so none
/// of them takes this port meanwhile.
pub(crate) fn free_address() -> SocketAddr {
    static COUNT: AtomicU16 = AtomicU16::new(1);
    let [first, second] = COUNT.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    let own = std::process::id().to_le_bytes()[0];
    let ip = Ipv4Addr::new(127, own.max(1), first, second);
    let free = TcpListener::bind((ip, 0)).expect("a port");
    free.local_addr().expect("an address")
}
