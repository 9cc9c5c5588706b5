//! Several contributions to an exchange, as one message. `REMOTE.md`, "Exchanges".

use std::mem;
use std::ops::Range;
use std::sync::Arc;

use hsdp_sharding::Rank;
use serde::{Deserialize, Serialize};

use super::buffer::{BLOCK_BYTES, BufferPool};
use super::exchanges::{ExchangeBatch, ExchangeKey, Forwarded};
use super::header::{bytes, read};
use super::message::{MessageKind, RankMessage};
use super::transmit::Payload;

/// The header of a batch.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Batched {
    epoch: u64,
    number: u64,
    /// The headers of the contributions, each once: ranks that agree have one.
    headers: Vec<Vec<u8>>,
    parts: Vec<BatchPart>,
}

/// A contribution: its elements follow those before it, from the next multiple of [`BLOCK_BYTES`].
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct BatchPart {
    rank: u32,
    /// The index of its header.
    header: u32,
    len: u64,
}

impl ExchangeBatch {
    /// `None` if there is no memory for it.
    pub(super) fn write(&self, pool: &Arc<BufferPool>) -> Option<RankMessage> {
        let ExchangeKey { epoch, number } = self.key;
        let mut headers = Vec::<&[u8]>::new();
        let mut parts = Vec::with_capacity(self.contributions.len());
        for Forwarded { rank, header, payload } in &self.contributions {
            let known = headers.iter().position(|known| **known == **header);
            let index = known.unwrap_or(headers.len());
            if known.is_none() {
                headers.push(header);
            }
            let rank = rank.get();
            let len = payload.bytes().len() as u64;
            parts.push(BatchPart { rank, header: u32::try_from(index).ok()?, len });
        }
        let headers = headers.into_iter().map(<[u8]>::to_vec).collect();
        let header = bytes(&Batched { epoch, number, headers, parts });
        let body =
            self.contributions.iter().map(|it| padded(it.payload.bytes().len())).sum::<usize>();
        let mut message = RankMessage::write(pool, MessageKind::Exchange, 0, &header, body)?;
        let mut rest = message.body_mut();
        for Forwarded { payload, .. } in &self.contributions {
            let (elements, behind) = rest.split_at_mut(padded(payload.bytes().len()));
            let (elements, padding) = elements.split_at_mut(payload.bytes().len());
            elements.copy_from_slice(payload.bytes());
            padding.fill(0);
            rest = behind;
        }
        Some(message)
    }

    /// # Errors
    /// The problem with the message.
    pub(super) fn read(message: &Arc<RankMessage>, size: usize) -> Result<Self, String> {
        let Batched { epoch, number, headers, parts } = read(message.header())?;
        let headers: Vec<Arc<[u8]>> = headers.into_iter().map(Into::into).collect();
        let mut is_there = vec![false; size];
        let mut contributions = Vec::new();
        let mut start = 0;
        for part in parts {
            let rank = part.checked(&mut is_there)?;
            let header = headers.get(part.header as usize);
            let header = header.ok_or_else(|| format!("rank {rank} has no header"))?;
            let range = part.range(start, message.body())?;
            start += padded(range.len());
            let header = Arc::clone(header);
            let payload = Payload::part(message, range);
            contributions.push(Forwarded { rank, header, payload });
        }
        match message.body().len() - start {
            0 => Ok(Self { key: ExchangeKey { epoch, number }, contributions }),
            rest => Err(format!("{rest} bytes follow its contributions")),
        }
    }
}

impl BatchPart {
    /// The rank, which is not among those that are there.
    fn checked(&self, is_there: &mut [bool]) -> Result<Rank, String> {
        let Self { rank, .. } = self;
        let size = is_there.len();
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
        let Self { rank, len, .. } = self;
        let rest = body.len() - start;
        let len = usize::try_from(*len).ok().filter(|len| *len <= rest && padded(*len) <= rest);
        let len = len.ok_or_else(|| {
            let encoded = self.len;
            format!("it has {rest} bytes where the contribution of rank {rank} states {encoded}")
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
        let message = RankMessage::write(&Arc::default(), MessageKind::Data, 0, b"", len);
        let mut message = message.expect("there is memory");
        message.body_mut().fill(7);
        Payload::whole(message)
    }

    fn batch() -> ExchangeBatch {
        let contribution = |rank: usize| {
            let header = if rank == 1 { &b"another"[..] } else { b"to all" };
            let payload = payload(100 * rank);
            let rank = Rank::new(rank);
            Forwarded { rank, header: header.into(), payload }
        };
        let key = ExchangeKey { epoch: 3, number: 5 };
        ExchangeBatch { key, contributions: [2, 0, 1].map(contribution).into() }
    }

    fn written(batch: &ExchangeBatch) -> Arc<RankMessage> {
        Arc::new(batch.write(&Arc::default()).expect("there is memory"))
    }

    #[test]
    fn a_batch_reads_as_it_was_written() {
        let message = written(&batch());
        assert_eq!(ExchangeBatch::read(&message, 3), Ok(batch()));
        assert_eq!(message.body().len(), 256 + 128);
        let same = "to all".len() + "another".len();
        assert!(message.header().len() < 2 * same + 20, "equal headers are sent once");
    }

    #[test]
    fn a_batch_that_does_not_fit_is_refused() {
        let refused =
            |batch: &ExchangeBatch, size| ExchangeBatch::read(&written(batch), size).unwrap_err();
        assert_eq!(refused(&batch(), 2), "it has a contribution of rank 2, and the world has 2");
        let mut twice = batch();
        twice.contributions[1].rank = Rank::new(2);
        assert_eq!(refused(&twice, 3), "it has two contributions of rank 2");
        let read = |header, len, body: &[u8]| {
            let headers = vec![vec![1]];
            let parts = vec![BatchPart { rank: 0, header, len }];
            let encoded = bytes(&Batched { epoch: 0, number: 0, headers, parts });
            let message =
                RankMessage::write(&Arc::default(), MessageKind::Exchange, 0, &encoded, body.len());
            let mut message = message.expect("there is memory");
            message.body_mut().copy_from_slice(body);
            ExchangeBatch::read(&Arc::new(message), 1).map(drop).map_err(|problem| problem.clone())
        };
        assert_eq!(read(0, 64, &[1; 64]), Ok(()));
        assert_eq!(read(1, 64, &[1; 64]), Err("rank 0 has no header".into()));
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
