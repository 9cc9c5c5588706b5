//! Several contributions to an exchange, as one message. `REMOTE.md`, "Exchanges".

use std::mem;
use std::ops::Range;
use std::sync::Arc;

use hsdp_sharding::Rank;
use serde::{Deserialize, Serialize};

use super::buffer::{BLOCK_BYTES, Shelf};
use super::exchanges::{Batch, Contribution, ExchangeKey};
use super::letter::{Kind, Letter};
use super::payload::Payload;
use super::statement::{bytes, read};

/// The statement of a batch.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Batched {
    epoch: u64,
    number: u64,
    /// The statements of the contributions, each once: ranks that agree have one.
    statements: Vec<Vec<u8>>,
    parts: Vec<Part>,
}

/// A contribution: its elements follow those before it, from the next multiple of [`BLOCK_BYTES`].
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Part {
    rank: u32,
    /// The index of its statement.
    statement: u32,
    len: u64,
}

impl Batch {
    /// `None` if there is no memory for it.
    pub(super) fn write(&self, shelf: &Arc<Shelf>) -> Option<Letter> {
        let (ExchangeKey { epoch, number }, mut statements) = (self.key, Vec::<&[u8]>::new());
        let mut parts = Vec::with_capacity(self.contributions.len());
        for Contribution { rank, statement, payload } in &self.contributions {
            let known = statements.iter().position(|known| **known == **statement);
            let index = known.unwrap_or(statements.len());
            if known.is_none() {
                statements.push(statement);
            }
            let (rank, len) = (rank.get(), payload.bytes().len() as u64);
            parts.push(Part { rank, statement: u32::try_from(index).ok()?, len });
        }
        let statements = statements.into_iter().map(<[u8]>::to_vec).collect();
        let statement = bytes(&Batched { epoch, number, statements, parts });
        let body =
            self.contributions.iter().map(|it| padded(it.payload.bytes().len())).sum::<usize>();
        let mut letter = Letter::write(shelf, (Kind::Exchange, 0), &statement, body)?;
        let mut rest = letter.body_mut();
        for Contribution { payload, .. } in &self.contributions {
            let (elements, behind) = rest.split_at_mut(padded(payload.bytes().len()));
            let (elements, padding) = elements.split_at_mut(payload.bytes().len());
            elements.copy_from_slice(payload.bytes());
            padding.fill(0);
            rest = behind;
        }
        Some(letter)
    }

    /// # Errors
    /// What is wrong with the message.
    pub(super) fn read(letter: &Arc<Letter>, size: usize) -> Result<Self, String> {
        let Batched { epoch, number, statements, parts } = read(letter.statement())?;
        let statements: Vec<Arc<[u8]>> = statements.into_iter().map(Into::into).collect();
        let (mut is_there, mut contributions, mut start) = (vec![false; size], Vec::new(), 0);
        for part in parts {
            let rank = part.checked(&mut is_there)?;
            let statement = statements.get(part.statement as usize);
            let statement = statement.ok_or_else(|| format!("rank {rank} has no statement"))?;
            let range = part.range(start, letter.body())?;
            start += padded(range.len());
            let (statement, payload) = (Arc::clone(statement), Payload::part(letter, range));
            contributions.push(Contribution { rank, statement, payload });
        }
        match letter.body().len() - start {
            0 => Ok(Self { key: ExchangeKey { epoch, number }, contributions }),
            rest => Err(format!("{rest} bytes follow its contributions")),
        }
    }
}

impl Part {
    /// The rank, which is not among those that are there.
    fn checked(&self, is_there: &mut [bool]) -> Result<Rank, String> {
        let (Self { rank, .. }, size) = (self, is_there.len());
        let known = is_there.get_mut(*rank as usize).ok_or_else(|| {
            format!("it has a contribution of rank {rank}, and the world has {size}")
        })?;
        match mem::replace(known, true) {
            false => Ok(Rank::new(*rank as usize)),
            true => Err(format!("it has two contributions of rank {rank}")),
        }
    }

    /// The elements, which begin at `start`.
    fn range(&self, start: usize, body: &[u8]) -> Result<Range<usize>, String> {
        let (Self { rank, len, .. }, rest) = (self, body.len() - start);
        let len = usize::try_from(*len).ok().filter(|len| *len <= rest && padded(*len) <= rest);
        let len = len.ok_or_else(|| {
            let stated = self.len;
            format!("it has {rest} bytes where the contribution of rank {rank} states {stated}")
        })?;
        match body[start + len..start + padded(len)].iter().all(|byte| *byte == 0) {
            true => Ok(start..start + len),
            false => Err(format!("the padding of the contribution of rank {rank} is not zero")),
        }
    }
}

fn padded(len: usize) -> usize {
    len.next_multiple_of(BLOCK_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payload(len: usize) -> Payload {
        let letter = Letter::write(&Arc::default(), (Kind::Parcel, 0), b"", len);
        let mut letter = letter.expect("there is memory");
        letter.body_mut().fill(7);
        Payload::whole(letter)
    }

    fn batch() -> Batch {
        let contribution = |rank: usize| {
            let statement = if rank == 1 { &b"another"[..] } else { b"to all" };
            let (rank, payload) = (Rank::new(rank), payload(100 * rank));
            Contribution { rank, statement: statement.into(), payload }
        };
        let key = ExchangeKey { epoch: 3, number: 5 };
        Batch { key, contributions: [2, 0, 1].map(contribution).into() }
    }

    fn written(batch: &Batch) -> Arc<Letter> {
        Arc::new(batch.write(&Arc::default()).expect("there is memory"))
    }

    #[test]
    fn a_batch_reads_as_it_was_written() {
        let letter = written(&batch());
        assert_eq!(Batch::read(&letter, 3), Ok(batch()));
        assert_eq!(letter.body().len(), 256 + 128);
        let same = "to all".len() + "another".len();
        assert!(letter.statement().len() < 2 * same + 20, "equal statements are sent once");
    }

    #[test]
    fn a_batch_that_does_not_fit_is_refused() {
        let refused = |batch: &Batch, size| Batch::read(&written(batch), size).unwrap_err();
        assert_eq!(refused(&batch(), 2), "it has a contribution of rank 2, and the world has 2");
        let mut twice = batch();
        twice.contributions[1].rank = Rank::new(2);
        assert_eq!(refused(&twice, 3), "it has two contributions of rank 2");
        let read = |statement, len, body: &[u8]| {
            let (statements, parts) = (vec![vec![1]], vec![Part { rank: 0, statement, len }]);
            let stated = bytes(&Batched { epoch: 0, number: 0, statements, parts });
            let letter = Letter::write(&Arc::default(), (Kind::Exchange, 0), &stated, body.len());
            let mut letter = letter.expect("there is memory");
            letter.body_mut().copy_from_slice(body);
            Batch::read(&Arc::new(letter), 1).map(drop).map_err(|problem| problem.clone())
        };
        assert_eq!(read(0, 64, &[1; 64]), Ok(()));
        assert_eq!(read(1, 64, &[1; 64]), Err("rank 0 has no statement".into()));
        assert_eq!(read(0, 64, &[1; 128]), Err("64 bytes follow its contributions".into()));
        let states = |len: u64, found| {
            Err(format!("it has {found} bytes where the contribution of rank 0 states {len}"))
        };
        assert_eq!(read(0, 64, &[1; 63]), states(64, 63));
        assert_eq!(read(0, 63, &[1; 63]), states(63, 63), "the padding is missing");
        assert_eq!(read(0, u64::MAX, &[1; 64]), states(u64::MAX, 64));
        let padding = "the padding of the contribution of rank 0 is not zero";
        assert_eq!(read(0, 63, &[1; 64]), Err(padding.into()));
    }
}
