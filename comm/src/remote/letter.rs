//! What travels between ranks that share no memory: a head, a statement, and elements. `REMOTE.md`, "Messages".

use std::ops::Range;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use xxhash_rust::xxh3::Xxh3;

use super::buffer::{BLOCK_BYTES, Buffer, Shelf};

/// What every letter begins with: who finds something else there was sent no letter of this version.
const MAGIC: [u8; 8] = *b"hsdpltr1";

/// Longer statements are refused: none of ours comes near.
pub(crate) const MOST_STATEMENT: usize = 1 << 20;

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The identity of its sender: the first message of a rank.
    Hello,
    /// Its sender's part in an operation.
    Parcel,
    /// Its sender sends nothing more in an epoch.
    Stop,
    /// Ranks that wait for each other, as far as the probe has come.
    Probe,
    /// The world is over.
    End,
    /// Its sender has left.
    Left,
    /// Contributions to an exchange.
    Exchange,
}

impl Kind {
    const ALL: [Self; 7] =
        [Self::Hello, Self::Parcel, Self::Stop, Self::Probe, Self::End, Self::Left, Self::Exchange];
}

/// The first block of a letter, in the byte order of the machine: hello compares those.
#[derive(Clone, Copy, Zeroable, Pod)]
#[repr(C)]
struct Head {
    magic: [u8; 8],
    /// Of the head without this, and of the statement.
    check: u64,
    body: u64,
    statement: u32,
    kind: u8,
    round: u8,
    unused: [u16; 13],
    /// The number of exchanges to which its sender had contributed.
    exchanged: u64,
}

/// A letter, as it is sent.
#[derive(Debug)]
pub(crate) struct Letter {
    buffer: Buffer,
    kind: Kind,
    round: u8,
    exchanged: u64,
    statement: usize,
    body: usize,
}

impl Letter {
    /// Writes a letter with room for so many bytes of elements. `None` if there is no memory for it.
    pub(crate) fn write(
        shelf: &Arc<Shelf>,
        (kind, round): (Kind, u8),
        statement: &[u8],
        body: usize,
    ) -> Option<Self> {
        let len = BLOCK_BYTES + statement.len().next_multiple_of(BLOCK_BYTES) + body;
        let (buffer, statement_bytes) = (shelf.take(len)?, statement.len());
        let mut letter =
            Self { buffer, kind, round, exchanged: 0, statement: statement_bytes, body };
        let statement_len = u32::try_from(statement.len()).ok()?;
        let mut head = Head {
            magic: MAGIC,
            check: 0,
            body: body as u64,
            statement: statement_len,
            kind: kind as u8,
            round,
            unused: [0; 13],
            exchanged: 0,
        };
        head.check = check(&head, statement);
        let bytes = letter.buffer.bytes_mut();
        bytes[..BLOCK_BYTES].copy_from_slice(bytemuck::bytes_of(&head));
        bytes[BLOCK_BYTES..][..statement.len()].copy_from_slice(statement);
        // The buffer served another letter before, of which nothing is to travel.
        let [filling, rest] = letter.fillings();
        letter.buffer.bytes_mut()[filling].fill(0);
        letter.buffer.bytes_mut()[rest].fill(0);
        Some(letter)
    }

    /// The same, of a sender that has contributed to so many exchanges before.
    pub(crate) fn after(mut self, exchanged: u64) -> Self {
        let (first, rest) = self.buffer.bytes_mut().split_at_mut(BLOCK_BYTES);
        let head: Head = bytemuck::pod_read_unaligned(first);
        let mut head = Head { check: 0, exchanged, ..head };
        head.check = check(&head, &rest[..self.statement]);
        first.copy_from_slice(bytemuck::bytes_of(&head));
        Self { exchanged, ..self }
    }

    /// Reads what was received.
    ///
    /// # Errors
    /// What is wrong with it: nothing that it says was believed.
    pub(crate) fn read(buffer: Buffer) -> Result<Self, String> {
        let bytes = buffer.bytes();
        let head = bytes.get(..BLOCK_BYTES).ok_or("it is empty")?;
        let head: Head = bytemuck::pod_read_unaligned(head);
        if head.magic != MAGIC {
            return Err(format!("it begins with {:02x?}, not {MAGIC:02x?}", head.magic));
        }
        let kind = Kind::ALL.get(usize::from(head.kind));
        let kind = *kind.ok_or_else(|| format!("its kind {} is unknown", head.kind))?;
        let statement = head.statement as usize;
        if statement > MOST_STATEMENT {
            return Err(format!("its statement has {statement} bytes, at most {MOST_STATEMENT}"));
        }
        let told = BLOCK_BYTES as u64 + statement.next_multiple_of(BLOCK_BYTES) as u64;
        let told = told.checked_add(head.body).and_then(|len| len.checked_next_multiple_of(64));
        if told != Some(bytes.len() as u64) {
            let body = head.body;
            return Err(format!(
                "it has {} bytes, but states {statement} bytes of statement and {body} bytes of elements",
                bytes.len()
            ));
        }
        let stated = &bytes[BLOCK_BYTES..][..statement];
        if head.check != check(&Head { check: 0, ..head }, stated) {
            return Err("its checksum is wrong".to_owned());
        }
        let (round, body) = (head.round, usize::try_from(head.body).map_err(|it| it.to_string())?);
        let letter = Self { buffer, kind, round, exchanged: head.exchanged, statement, body };
        letter.is_filled_up_with_zeros(&head)?;
        letter.has_what_its_kind_has()?;
        Ok(letter)
    }

    fn is_filled_up_with_zeros(&self, head: &Head) -> Result<(), String> {
        let is_zero = |range: Range<usize>| self.bytes()[range].iter().all(|byte| *byte == 0);
        if head.unused == [0; 13] && self.fillings().into_iter().all(is_zero) {
            Ok(())
        } else {
            Err("its padding is not zero".to_owned())
        }
    }

    /// Only parcels have rounds, only they and exchanges have more than a statement, and a rank that has left states nothing. The last
    /// messages of an epoch and of a rank follow its exchanges.
    fn has_what_its_kind_has(&self) -> Result<(), String> {
        let Self { kind, round, exchanged, statement, body, .. } = self;
        if *exchanged > 0 && !matches!(kind, Kind::Stop | Kind::Left) {
            return Err(format!("it is a message of kind {kind:?}, after {exchanged} exchanges"));
        }
        let is_odd = match kind {
            Kind::Parcel => false,
            Kind::Exchange => *round != 0,
            Kind::Left => (*round, *statement, *body) != (0, 0, 0),
            _ => (*round, *body) != (0, 0),
        };
        if is_odd {
            let what =
                format!("round {round}, {statement} bytes of statement and {body} of elements");
            return Err(format!("it is a message of kind {kind:?}, with {what}"));
        }
        Ok(())
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    /// The number of exchanges to which its sender had contributed, of the last message of an epoch or of a rank.
    pub(crate) fn exchanged(&self) -> u64 {
        self.exchanged
    }

    /// Of a parcel: which of the rounds of its operation it is for.
    pub(crate) fn round(&self) -> u8 {
        self.round
    }

    pub(crate) fn statement(&self) -> &[u8] {
        &self.buffer.bytes()[BLOCK_BYTES..][..self.statement]
    }

    /// The elements, as bytes that are aligned for all.
    pub(crate) fn body(&self) -> &[u8] {
        &self.buffer.bytes()[self.start()..][..self.body]
    }

    pub(crate) fn body_mut(&mut self) -> &mut [u8] {
        let range = self.start()..self.start() + self.body;
        &mut self.buffer.bytes_mut()[range]
    }

    /// All of it, a multiple of [`BLOCK_BYTES`].
    pub(crate) fn bytes(&self) -> &[u8] {
        self.buffer.bytes()
    }

    /// What is between the statement and the elements, and behind those.
    fn fillings(&self) -> [Range<usize>; 2] {
        let start = self.start();
        [BLOCK_BYTES + self.statement..start, start + self.body..self.bytes().len()]
    }

    fn start(&self) -> usize {
        BLOCK_BYTES + self.statement.next_multiple_of(BLOCK_BYTES)
    }
}

fn check(head: &Head, statement: &[u8]) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(bytemuck::bytes_of(head));
    hash.update(statement);
    hash.digest()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn buffer(bytes: &[u8]) -> Buffer {
        let shelf = Arc::<Shelf>::default();
        let mut buffer = shelf.take(bytes.len()).expect("there is memory");
        buffer.bytes_mut().copy_from_slice(bytes);
        buffer
    }

    fn letter() -> Letter {
        let shelf = Arc::default();
        let statement = b"what this is about";
        let mut letter = Letter::write(&shelf, (Kind::Parcel, 1), statement, 12).expect("memory");
        letter.body_mut().copy_from_slice(bytemuck::cast_slice(&[1.0_f32, 2.0, 3.0]));
        letter
    }

    #[test]
    fn a_letter_reads_as_it_was_written() {
        let written = letter();
        let read = Letter::read(buffer(written.bytes())).expect("it is one");
        assert_eq!((read.kind(), read.round()), (Kind::Parcel, 1));
        assert_eq!(read.statement(), b"what this is about");
        assert_eq!(bytemuck::cast_slice::<_, f32>(read.body()), [1.0, 2.0, 3.0]);
    }

    #[test]
    fn what_is_no_letter_is_refused() {
        let written = letter();
        let refused = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = written.bytes().to_vec();
            change(&mut bytes);
            Letter::read(buffer(&bytes)).map(|_| ()).expect_err("it is none")
        };
        assert_eq!(refused(&|bytes| bytes.clear()), "it is empty");
        assert!(refused(&|bytes| bytes[0] = b'H').starts_with("it begins with [48, 73,"));
        assert_eq!(refused(&|bytes| bytes[28] = 9), "its kind 9 is unknown");
        let lengths = "it has 192 bytes, but states 18 bytes of statement and 13 bytes of elements";
        assert_eq!(refused(&|bytes| bytes[16] = 13), "its checksum is wrong");
        assert_eq!(
            refused(&|bytes| bytes.truncate(128)),
            lengths.replace("192", "128").replace("13", "12")
        );
        assert!(
            refused(&|bytes| bytes[23] = 0x80).contains("9223372036854775820 bytes of elements")
        );
        assert!(refused(&|bytes| bytes[16..24].fill(0xff)).contains("18446744073709551615"));
        assert!(refused(&|bytes| bytes[24..28].fill(0xff)).starts_with("its statement has 42949"));
        assert_eq!(refused(&|bytes| bytes[70] ^= 1), "its checksum is wrong");
        let zeros = "its padding is not zero";
        assert_eq!(refused(&|bytes| bytes[64 + 18] = 1), zeros);
        assert_eq!(refused(&|bytes| bytes[128 + 12] = 1), zeros);
    }

    #[test]
    fn only_parcels_have_rounds_and_elements() {
        let refused = |(kind, round), statement: &[u8], body| {
            let written = Letter::write(&Arc::default(), (kind, round), statement, body);
            let written = written.expect("there is memory");
            Letter::read(buffer(written.bytes())).map(|_| ()).err()
        };
        assert_eq!(refused((Kind::Left, 0), b"", 0), None);
        assert_eq!(refused((Kind::Stop, 0), b"why", 0), None);
        assert_eq!(refused((Kind::Exchange, 0), b"whose", 64), None);
        let odd = |kind, with| Some(format!("it is a message of kind {kind:?}, with {with}"));
        let with = "round 0, 1 bytes of statement and 0 of elements";
        assert_eq!(refused((Kind::Left, 0), b"x", 0), odd(Kind::Left, with));
        let with = "round 1, 3 bytes of statement and 0 of elements";
        assert_eq!(refused((Kind::Stop, 1), b"why", 0), odd(Kind::Stop, with));
        let with = "round 2, 5 bytes of statement and 64 of elements";
        assert_eq!(refused((Kind::Exchange, 2), b"whose", 64), odd(Kind::Exchange, with));
        let with = "round 0, 3 bytes of statement and 4 of elements";
        assert_eq!(refused((Kind::Hello, 0), b"who", 4), odd(Kind::Hello, with));
    }

    #[test]
    fn the_last_messages_say_how_many_exchanges_came_before() {
        let after = |kind, statement: &[u8]| {
            let letter = Letter::write(&Arc::default(), (kind, 0), statement, 0);
            let letter = letter.expect("there is memory").after(300);
            Letter::read(buffer(letter.bytes())).map(|letter| letter.exchanged())
        };
        assert_eq!(after(Kind::Stop, b"why"), Ok(300));
        assert_eq!(after(Kind::Left, b""), Ok(300));
        let odd = "it is a message of kind Probe, after 300 exchanges".to_owned();
        assert_eq!(after(Kind::Probe, b"path"), Err(odd));
    }

    #[test]
    fn nothing_of_a_letter_is_in_another_that_has_its_buffer() {
        let shelf = Arc::<Shelf>::default();
        let mut first = shelf.take(192).expect("there is memory");
        first.bytes_mut().fill(7);
        let address = first.bytes().as_ptr();
        drop(first);
        let mut second = Letter::write(&shelf, (Kind::Parcel, 1), b"what this is about", 12)
            .expect("there is memory");
        assert_eq!(second.bytes().as_ptr(), address);
        second.body_mut().copy_from_slice(letter().body());
        assert_eq!(second.bytes(), letter().bytes());
    }

    proptest! {
        #[test]
        fn whatever_comes_is_read_or_refused(mut bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            bytes.resize(bytes.len() / 64 * 64, 0);
            let _ = Letter::read(buffer(&bytes));
            // And with a head that looks like one.
            if bytes.len() >= 64 {
                bytes[..8].copy_from_slice(&MAGIC);
                let _ = Letter::read(buffer(&bytes));
            }
        }
    }
}
