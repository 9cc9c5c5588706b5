//! A network between a member and its coordinator that loses or changes bytes.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use hsdp_control::{Membership, Options, Rank};

use crate::world::{World, each};

/// A direction of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    ToCoordinator,
    ToMember,
}

/// The part of a message that changes on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spot {
    /// The last byte of the MAC.
    Mac,
    /// The first byte of the frame, which then cannot be decoded.
    Head,
    /// The number of the stream of HTTP/2, which then ends the connection.
    Stream,
}

/// The damage that the network does in each direction. It forwards bytes unchanged where there is none.
#[derive(Clone, Copy, Debug, Default)]
struct Damage {
    /// Directions in which no bytes are forwarded, while no connection ends.
    cut: [bool; 2],
    /// The next message is changed.
    changed: [Option<Spot>; 2],
}

/// A proxy to the coordinator.
pub(crate) struct Way {
    pub(crate) address: SocketAddr,
    damage: Arc<Mutex<Damage>>,
}

impl Way {
    pub(crate) fn to(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let damage = Arc::<Mutex<Damage>>::default();
        let done = Arc::clone(&damage);
        thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let Ok(far) = TcpStream::connect(server) else { return };
                let ways =
                    [(Direction::ToCoordinator, &near, &far), (Direction::ToMember, &far, &near)];
                for (direction, from, to) in ways {
                    let from = from.try_clone().expect("one");
                    let to = to.try_clone().expect("one");
                    let done = Arc::clone(&done);
                    thread::spawn(move || carry(from, to, direction, &done));
                }
            }
        });
        Self { address, damage }
    }

    /// A world whose last rank connects through this network.
    pub(crate) fn in_world(world: &World) -> (Self, Vec<Membership>) {
        let way = Self::to(world.server.address());
        let members = each((0..world.size).collect(), |rank| {
            if rank + 1 == world.size {
                way.join(world, rank)
            } else {
                world.join_as(rank).expect("a member")
            }
        });
        (way, members)
    }

    /// The member of this rank, which connects through this network.
    pub(crate) fn join(&self, world: &World, rank: u32) -> Membership {
        let options = Options { address: self.address, ..world.options() };
        Membership::join(Rank::new(rank as usize), options).expect("a member")
    }

    pub(crate) fn cut(&self, directions: &[Direction]) {
        let mut damage = self.damage.lock().unwrap_or_else(PoisonError::into_inner);
        directions.iter().for_each(|direction| damage.cut[*direction as usize] = true);
    }

    /// Ends all cuts. The frames that wait are forwarded with the next one.
    pub(crate) fn mend(&self) {
        self.damage.lock().unwrap_or_else(PoisonError::into_inner).cut = [false; 2];
    }

    /// Changes the next message in this direction.
    pub(crate) fn change(&self, direction: Direction, spot: Spot) {
        let mut damage = self.damage.lock().unwrap_or_else(PoisonError::into_inner);
        damage.changed[direction as usize] = Some(spot);
    }
}

/// Whether the frames are forwarded, after the damage that is due.
fn apply(damage: &Mutex<Damage>, direction: Direction, frames: &mut [u8]) -> bool {
    let mut damage = damage.lock().unwrap_or_else(PoisonError::into_inner);
    let changed = &mut damage.changed[direction as usize];
    if changed.is_some_and(|spot| change(frames, spot)) {
        *changed = None;
    }
    !damage.cut[direction as usize]
}

/// Bytes of the head of a frame of HTTP/2, and of a message of gRPC in it.
const HEAD: usize = 9;
const MESSAGE_HEAD: usize = 5;

/// The bytes that a client of HTTP/2 sends before its first frame.
const PREFACE: usize = 24;

/// The first frame of HTTP/2 with its head, and the bytes after it; `None` if the frame is not complete.
fn first_frame(bytes: &mut [u8]) -> Option<(&mut [u8], &mut [u8])> {
    let head = *bytes.first_chunk::<3>()?;
    let len = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
    bytes.split_at_mut_checked(HEAD + len)
}

/// Changes a byte of the first message in these frames. Returns whether there is one.
fn change(mut frames: &mut [u8], spot: Spot) -> bool {
    while let Some((frame, rest)) = first_frame(frames) {
        if frame[3] == 0 && frame.len() > HEAD + MESSAGE_HEAD {
            match spot {
                Spot::Mac => *frame.last_mut().expect("it has bytes") ^= 1,
                Spot::Head => frame[HEAD + MESSAGE_HEAD] |= 7,
                Spot::Stream => frame[HEAD - 1] = 0,
            }
            return true;
        }
        frames = rest;
    }
    false
}

/// The number of bytes of the complete frames at the beginning.
fn complete(bytes: &mut [u8]) -> usize {
    let mut len = 0;
    while let Some((frame, _)) = first_frame(&mut bytes[len..]) {
        len += frame.len();
    }
    len
}

/// Forwards frames, with the damage that is due, until an end of the connection. After a cut it reads on, and forwards neither frames
/// nor the end of the connection; the frames wait until the cut is mended.
fn carry(mut from: TcpStream, mut to: TcpStream, direction: Direction, damage: &Mutex<Damage>) {
    let mut read = [0; 4096];
    let mut waiting = Vec::new();
    let mut preface = if direction == Direction::ToCoordinator { PREFACE } else { 0 };
    loop {
        match from.read(&mut read) {
            Ok(count @ 1..) => waiting.extend_from_slice(&read[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Ok(0) | Err(_) => break,
        }
        if waiting.len() < preface {
            continue;
        }
        let len = preface + complete(&mut waiting[preface..]);
        if !apply(damage, direction, &mut waiting[preface..len]) {
            continue;
        }
        if to.write_all(&waiting[..len]).is_err() {
            break;
        }
        waiting.drain(..len);
        preface = 0;
    }
    if apply(damage, direction, &mut []) {
        // Both ends may be gone already.
        let _ = to.shutdown(Shutdown::Both);
    }
}
