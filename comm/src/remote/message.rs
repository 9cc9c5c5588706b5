//! The messages of ranks that share no memory: a prefix, a header, and elements. `REMOTE.md`, "Messages".

use std::ops::Range;
use std::sync::Arc;

use bytemuck::{CheckedBitPattern, Pod, Zeroable};
use xxhash_rust::xxh3::Xxh3;

use super::buffer::{BLOCK_BYTES, Buffer, BufferPool};

/// The first bytes of each message of this version.
const MAGIC: [u8; 8] = *b"hsdpltr2";

/// Longer headers are refused: none of ours comes near, except a welcome, which grows with the job.
pub(crate) const MOST_STATEMENT: usize = 1 << 20;

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, CheckedBitPattern)]
#[repr(u8)]
pub enum MessageKind {
    /// The identity of its sender, to process 0: the first message of another process.
    Hello,
    /// Its sender's part in an operation.
    Data,
    /// Its sender sends nothing more in an epoch.
    Stop,
    /// Its sender sees an end of the world, about which the receiver decides.
    Proposal,
    /// The world is over.
    End,
    /// Its sender has left, with this last state.
    Left,
    /// Contributions to an exchange.
    Exchange,
    /// The hellos of all processes: the first message of process 0.
    Welcome,
    /// A report, a question, a state or a verdict.
    Compare,
    /// The calls of NCCL that its sender has made in an epoch that is over.
    Drain,
}

/// The first block of a message, in the byte order of the machine: hello compares those.
#[derive(Clone, Copy, Debug, Zeroable, Pod)]
#[repr(C)]
struct Prefix {
    magic: [u8; 8],
    /// Of the prefix without this, and of the header.
    check: u64,
    body: u64,
    header: u32,
    /// A [`MessageKind`].
    kind: u8,
    round: u8,
    unused: [u16; 13],
    /// The number of exchanges to which its sender had contributed.
    exchanged: u64,
}

/// A message, as it is sent.
#[derive(Debug)]
pub struct RankMessage {
    buffer: Buffer,
    /// A copy of the first block.
    prefix: Prefix,
}

impl RankMessage {
    /// Writes a message with room for so many bytes of elements. `None` if there is no memory for it.
    pub(crate) fn write(
        pool: &Arc<BufferPool>,
        kind: MessageKind,
        round: u8,
        header: &[u8],
        body: usize,
    ) -> Option<Self> {
        let len = BLOCK_BYTES + header.len().next_multiple_of(BLOCK_BYTES) + body;
        let prefix = Prefix {
            magic: MAGIC,
            body: body as u64,
            header: u32::try_from(header.len()).ok()?,
            kind: kind as u8,
            round,
            ..Prefix::zeroed()
        };
        let mut message = Self { buffer: pool.take(len)?, prefix };
        message.buffer.bytes_mut()[BLOCK_BYTES..][..header.len()].copy_from_slice(header);
        // The buffer served another message before, of which nothing is to travel.
        for filling in message.fillings() {
            message.buffer.bytes_mut()[filling].fill(0);
        }
        Some(message.after(0))
    }

    /// The same, of a sender that has contributed to so many exchanges before.
    pub(crate) fn after(mut self, exchanged: u64) -> Self {
        self.prefix.exchanged = exchanged;
        self.prefix.check = self.check();
        self.buffer.bytes_mut()[..BLOCK_BYTES].copy_from_slice(bytemuck::bytes_of(&self.prefix));
        self
    }

    /// Reads a message that was received.
    ///
    /// # Errors
    /// The problem: no content of the message was used.
    pub(crate) fn read(buffer: Buffer) -> Result<Self, String> {
        let prefix = buffer.bytes().get(..BLOCK_BYTES).ok_or("it is empty")?;
        let prefix: Prefix = bytemuck::pod_read_unaligned(prefix);
        if prefix.magic != MAGIC {
            return Err(format!("it begins with {:02x?}, not {MAGIC:02x?}", prefix.magic));
        }
        if !MessageKind::is_valid_bit_pattern(&prefix.kind) {
            return Err(format!("its kind {} is unknown", prefix.kind));
        }
        let found = buffer.bytes().len();
        let header = prefix.header as usize;
        let body = prefix.body;
        if header > MOST_STATEMENT && prefix.kind != MessageKind::Welcome as u8 {
            return Err(format!("its header has {header} bytes, at most {MOST_STATEMENT}"));
        }
        let told = BLOCK_BYTES as u64 + header.next_multiple_of(BLOCK_BYTES) as u64;
        let told = told.checked_add(body).and_then(|len| len.checked_next_multiple_of(64));
        if told != Some(found as u64) {
            return Err(format!(
                "it has {found} bytes, but states {header} bytes of header and {body} bytes of elements"
            ));
        }
        let message = Self { buffer, prefix };
        if prefix.check != message.check() {
            return Err("its checksum is wrong".to_owned());
        }
        message.is_filled_up_with_zeros()?;
        message.has_what_its_kind_has()?;
        Ok(message)
    }

    /// The check of the prefix and the header.
    fn check(&self) -> u64 {
        let mut hash = Xxh3::new();
        hash.update(bytemuck::bytes_of(&Prefix { check: 0, ..self.prefix }));
        hash.update(self.header());
        hash.digest()
    }

    fn is_filled_up_with_zeros(&self) -> Result<(), String> {
        let is_zero = |range: Range<usize>| self.bytes()[range].iter().all(|byte| *byte == 0);
        if self.prefix.unused == [0; 13] && self.fillings().into_iter().all(is_zero) {
            Ok(())
        } else {
            Err("its padding is not zero".to_owned())
        }
    }

    /// Only data messages have rounds, and only they and exchanges have more than a header. The last
    /// messages of an epoch and of a rank follow its exchanges.
    fn has_what_its_kind_has(&self) -> Result<(), String> {
        let kind = self.kind();
        let Prefix { round, exchanged, header, body, .. } = self.prefix;
        if exchanged > 0 && !matches!(kind, MessageKind::Stop | MessageKind::Left) {
            return Err(format!("it is a message of kind {kind:?}, after {exchanged} exchanges"));
        }
        let is_odd = match kind {
            MessageKind::Data => false,
            MessageKind::Exchange => round != 0,
            _ => (round, body) != (0, 0),
        };
        if is_odd {
            let what = format!("round {round}, {header} bytes of header and {body} of elements");
            return Err(format!("it is a message of kind {kind:?}, with {what}"));
        }
        Ok(())
    }

    /// The kind.
    pub fn kind(&self) -> MessageKind {
        bytemuck::checked::cast(self.prefix.kind)
    }

    /// The number of exchanges to which its sender had contributed, of the last message of an epoch or of a rank.
    pub(crate) fn exchanged(&self) -> u64 {
        self.prefix.exchanged
    }

    /// Of a data message: the round of its operation.
    pub(crate) fn round(&self) -> u8 {
        self.prefix.round
    }

    /// The content besides elements.
    pub fn header(&self) -> &[u8] {
        &self.buffer.bytes()[BLOCK_BYTES..][..self.prefix.header as usize]
    }

    /// The elements, as bytes that are aligned for all.
    pub(crate) fn body(&self) -> &[u8] {
        &self.buffer.bytes()[self.elements()]
    }

    pub(crate) fn body_mut(&mut self) -> &mut [u8] {
        let range = self.elements();
        &mut self.buffer.bytes_mut()[range]
    }

    /// All of it, a multiple of [`BLOCK_BYTES`].
    pub(crate) fn bytes(&self) -> &[u8] {
        self.buffer.bytes()
    }

    /// The bytes between the header and the elements, and behind those.
    fn fillings(&self) -> [Range<usize>; 2] {
        let Range { start, end } = self.elements();
        [BLOCK_BYTES + self.prefix.header as usize..start, end..self.bytes().len()]
    }

    /// The bytes of the elements: so many are there, or the message was refused.
    fn elements(&self) -> Range<usize> {
        let start = BLOCK_BYTES + (self.prefix.header as usize).next_multiple_of(BLOCK_BYTES);
        #[expect(clippy::cast_possible_truncation, reason = "they are in memory")]
        let len = self.prefix.body as usize;
        start..start + len
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn buffer(bytes: &[u8]) -> Buffer {
        let pool = Arc::<BufferPool>::default();
        let mut buffer = pool.take(bytes.len()).expect("there is memory");
        buffer.bytes_mut().copy_from_slice(bytes);
        buffer
    }

    fn message() -> RankMessage {
        let pool = Arc::default();
        let header = b"what this is about";
        let mut message =
            RankMessage::write(&pool, MessageKind::Data, 1, header, 12).expect("memory");
        message.body_mut().copy_from_slice(bytemuck::cast_slice(&[1.0_f32, 2.0, 3.0]));
        message
    }

    #[test]
    fn a_message_reads_as_it_was_written() {
        let written = message();
        let read = RankMessage::read(buffer(written.bytes())).expect("it is one");
        assert_eq!((read.kind(), read.round()), (MessageKind::Data, 1));
        assert_eq!(read.header(), b"what this is about");
        assert_eq!(bytemuck::cast_slice::<_, f32>(read.body()), [1.0, 2.0, 3.0]);
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let written = message();
        let refused = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = written.bytes().to_vec();
            change(&mut bytes);
            RankMessage::read(buffer(&bytes)).map(|_| ()).expect_err("it is none")
        };
        assert_eq!(refused(&|bytes| bytes.clear()), "it is empty");
        assert!(refused(&|bytes| bytes[0] = b'H').starts_with("it begins with [48, 73,"));
        assert_eq!(refused(&|bytes| bytes[28] = 10), "its kind 10 is unknown");
        let lengths = "it has 192 bytes, but states 18 bytes of header and 13 bytes of elements";
        assert_eq!(refused(&|bytes| bytes[16] = 13), "its checksum is wrong");
        assert_eq!(
            refused(&|bytes| bytes.truncate(128)),
            lengths.replace("192", "128").replace("13", "12")
        );
        assert!(
            refused(&|bytes| bytes[23] = 0x80).contains("9223372036854775820 bytes of elements")
        );
        assert!(refused(&|bytes| bytes[16..24].fill(0xff)).contains("18446744073709551615"));
        assert!(refused(&|bytes| bytes[24..28].fill(0xff)).starts_with("its header has 42949"));
        assert_eq!(refused(&|bytes| bytes[70] ^= 1), "its checksum is wrong");
        let zeros = "its padding is not zero";
        assert_eq!(refused(&|bytes| bytes[64 + 18] = 1), zeros);
        assert_eq!(refused(&|bytes| bytes[128 + 12] = 1), zeros);
    }

    #[test]
    fn only_messages_have_rounds_and_elements() {
        let refused = |(kind, round), header: &[u8], body| {
            let written = RankMessage::write(&Arc::default(), kind, round, header, body);
            let written = written.expect("there is memory");
            RankMessage::read(buffer(written.bytes())).map(|_| ()).err()
        };
        assert_eq!(refused((MessageKind::Left, 0), b"", 0), None);
        assert_eq!(refused((MessageKind::Left, 0), b"a state", 0), None);
        assert_eq!(refused((MessageKind::Compare, 0), b"a report", 0), None);
        assert_eq!(refused((MessageKind::Stop, 0), b"why", 0), None);
        assert_eq!(refused((MessageKind::Exchange, 0), b"whose", 64), None);
        let odd = |kind, with| Some(format!("it is a message of kind {kind:?}, with {with}"));
        let with = "round 0, 1 bytes of header and 8 of elements";
        assert_eq!(refused((MessageKind::Left, 0), b"x", 8), odd(MessageKind::Left, with));
        let with = "round 1, 3 bytes of header and 0 of elements";
        assert_eq!(refused((MessageKind::Stop, 1), b"why", 0), odd(MessageKind::Stop, with));
        let with = "round 2, 5 bytes of header and 64 of elements";
        assert_eq!(
            refused((MessageKind::Exchange, 2), b"whose", 64),
            odd(MessageKind::Exchange, with)
        );
        let with = "round 0, 3 bytes of header and 4 of elements";
        assert_eq!(refused((MessageKind::Hello, 0), b"who", 4), odd(MessageKind::Hello, with));
    }

    #[test]
    fn the_last_messages_say_how_many_exchanges_came_before() {
        let after = |kind, header: &[u8]| {
            let message = RankMessage::write(&Arc::default(), kind, 0, header, 0);
            let message = message.expect("there is memory").after(300);
            RankMessage::read(buffer(message.bytes())).map(|message| message.exchanged())
        };
        assert_eq!(after(MessageKind::Stop, b"why"), Ok(300));
        assert_eq!(after(MessageKind::Left, b""), Ok(300));
        let odd = "it is a message of kind Compare, after 300 exchanges".to_owned();
        assert_eq!(after(MessageKind::Compare, b"path"), Err(odd));
    }

    #[test]
    fn nothing_of_a_message_is_in_another_that_has_its_buffer() {
        let pool = Arc::<BufferPool>::default();
        let mut first = pool.take(192).expect("there is memory");
        first.bytes_mut().fill(7);
        let address = first.bytes().as_ptr();
        drop(first);
        let mut second = RankMessage::write(&pool, MessageKind::Data, 1, b"what this is about", 12)
            .expect("there is memory");
        assert_eq!(second.bytes().as_ptr(), address);
        second.body_mut().copy_from_slice(message().body());
        assert_eq!(second.bytes(), message().bytes());
    }

    proptest! {
        #[test]
        fn whatever_comes_is_read_or_refused(mut bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            bytes.resize(bytes.len() / 64 * 64, 0);
            let _ = RankMessage::read(buffer(&bytes));
            // And with a prefix that looks like one.
            if bytes.len() >= 64 {
                bytes[..8].copy_from_slice(&MAGIC);
                let _ = RankMessage::read(buffer(&bytes));
            }
        }
    }
}
