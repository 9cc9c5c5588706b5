//! A network that is cut: packets are no longer delivered, and no connection ends.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hsdp_control::{Client, ClientOptions, ControlError, Rank, State};

use crate::world::{LONG, World, job, quick, secret, terms};

/// A proxy to the coordinator that can be cut.
struct Way {
    address: SocketAddr,
    cut: Arc<AtomicBool>,
}

impl Way {
    fn to(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let cut = Arc::new(AtomicBool::new(false));
        let is_cut = Arc::clone(&cut);
        thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let Ok(far) = TcpStream::connect(server) else { return };
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (from, to) = (from.try_clone().expect("one"), to.try_clone().expect("one"));
                    let is_cut = Arc::clone(&is_cut);
                    thread::spawn(move || carry(from, to, &is_cut));
                }
            }
        });
        Self { address, cut }
    }

    fn cut(&self) {
        self.cut.store(true, Ordering::Relaxed);
    }
}

/// Forwards bytes until the proxy is cut. Then it reads on, and forwards neither bytes nor the end of the connection.
fn carry(mut from: TcpStream, mut to: TcpStream, is_cut: &AtomicBool) {
    let mut bytes = [0; 4096];
    loop {
        let count = match from.read(&mut bytes) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(_) => break,
        };
        if !is_cut.load(Ordering::Relaxed) && to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    if !is_cut.load(Ordering::Relaxed) {
        // Both ends may be gone already.
        let _ = to.shutdown(Shutdown::Both);
    }
}

#[test]
fn both_sides_of_a_cut_get_an_error_with_a_name() {
    let world = World::of(2, quick());
    let way = Way::to(world.server.address());
    let far = ClientOptions::new(way.address, Rank::new(1), job(), secret(), terms(2));
    let far = thread::spawn(move || Client::join(far.deadlines(quick())));
    let near = Client::join(world.options(0)).expect("a member");
    let far = far.join().expect("no panic").expect("a member");
    far.wait_for(Duration::from_millis(300), |_| false);
    assert!(near.status().suspects().is_empty(), "the way is open");

    way.cut();
    let started = Instant::now();
    let status = far.wait_for(LONG, |status| status.ended().is_some());
    let said = status.ended().map(ControlError::to_string);
    let expected =
        format!("rank 1 is cut off: nothing from the coordinator at {} for 1.05s", way.address);
    assert_eq!(said, Some(expected.clone()));
    let refused = far.exchange("more", b"").expect_err("it is cut off").to_string();
    assert_eq!(refused, expected, "nobody goes on alone");
    let status = near.wait_for(LONG, |status| !status.lost().is_empty());
    let lost = State::Lost { why: "silent for 1.05s".into() };
    assert_eq!(status.state(Rank::new(1)), Some(&lost));
    assert!(near.exchange("more", b"").is_err());
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
}

#[test]
fn a_call_into_a_cut_ends() {
    let world = World::of(1, quick());
    let way = Way::to(world.server.address());
    let options = ClientOptions::new(way.address, Rank::new(0), job(), secret(), terms(1));
    let member = Client::join(options.deadlines(quick())).expect("a member");
    way.cut();
    let started = Instant::now();
    let error = member.exchange("k", b"").expect_err("nobody answers");
    assert!(matches!(error, ControlError::CutOff { .. }), "{error}");
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    assert!(member.leave().is_err());
}
