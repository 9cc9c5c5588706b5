//! all_gather, broadcast, gather, scatter, all_to_all.

use hsdp_kernels::Element;

use super::bytes;
use crate::call::Call;
use crate::work::{Copies, Exchange};
use crate::{Error, Group, Op, Pending, Tag};

/// # Collectives that move elements
///
/// All are **collective**: every member makes the same call, in the same place of the group's sequence, with
/// the same tag, dtype and counts. All return at once; a root is an index in the group.
///
/// Every call refuses, before anything is issued, what it can see to be wrong by itself
/// ([`Error::BadCount`], [`Error::BadMember`], [`Error::Reentrant`], [`Error::Absent`]) or has no room for
/// ([`Error::OutOfMemory`]), and passes on the error of a step or world that has ended. What only all members together can see comes out of [`Pending::wait`].
impl Group {
    /// Everybody gets everybody's elements, in member order.
    ///
    /// `values`: `[n]`; output `[size * n]`.
    ///
    /// # Errors
    /// As said above.
    pub fn all_gather<T: Element>(
        &self,
        tag: Tag,
        values: Vec<T>,
    ) -> Result<Pending<Vec<T>>, Error> {
        let (count, size) = (values.len(), self.size());
        let call = Call::new(Op::AllGather, tag).elements::<T>(count);
        let target = Some(self.room(&call, count.saturating_mul(size), "its output")?);
        let deposit = Exchange { source: values, target };
        let work = Copies::to_everybody;
        self.issue(call, deposit, work, |mine| {
            (bytes::<T>((size - 1) * count), mine.source.repeat(size))
        })
    }

    /// Everybody gets the root's elements.
    ///
    /// `values`: `[n]` on all members, who give their buffer and get it back filled; only the root's elements are
    /// read.
    ///
    /// # Errors
    /// [`Error::BadMember`] if there is no member `root`.
    pub fn broadcast<T: Element>(
        &self,
        tag: Tag,
        root: usize,
        values: Vec<T>,
    ) -> Result<Pending<Vec<T>>, Error> {
        let call = Call::new(Op::Broadcast, tag).elements::<T>(values.len()).root(self.member(
            Op::Broadcast,
            "the root",
            root,
        )?);
        let deposit = if self.index() == root {
            Exchange { source: values, target: None }
        } else {
            Exchange { source: Vec::new(), target: Some(values) }
        };
        let work = move |all| Ok(Copies::from_root(all, root));
        self.issue(call, deposit, work, |mine| match mine.target {
            Some(values) => (bytes::<T>(values.len()), values),
            None => (0, mine.source),
        })
    }

    /// The root gets everybody's elements, in member order; the others get `None`.
    ///
    /// `values`: `[n]`; output `[size * n]`.
    ///
    /// # Errors
    /// [`Error::BadMember`] if there is no member `root`.
    pub fn gather<T: Element>(
        &self,
        tag: Tag,
        root: usize,
        values: Vec<T>,
    ) -> Result<Pending<Option<Vec<T>>>, Error> {
        let (count, size) = (values.len(), self.size());
        let call = Call::new(Op::Gather, tag).elements::<T>(count).root(self.member(
            Op::Gather,
            "the root",
            root,
        )?);
        let room = || self.room(&call, count.saturating_mul(size), "its output");
        let target = (self.index() == root).then(room).transpose()?;
        let work = Copies::to_everybody;
        self.issue(call, Exchange { source: values, target }, work, |mine| match mine.target {
            Some(_) => (bytes::<T>((size - 1) * count), Some(mine.source.repeat(size))),
            None => (0, None),
        })
    }

    /// Member `i` gets the root's `i`-th part.
    ///
    /// `values`: `[size * count]` on the root, `None` on the others; output `[count]`.
    ///
    /// # Errors
    /// [`Error::BadMember`] if there is no member `root`; [`Error::BadCount`] if the root has no values or not as many
    /// as all members together expect, or another member has values.
    pub fn scatter<T: Element>(
        &self,
        tag: Tag,
        root: usize,
        values: Option<Vec<T>>,
        count: usize,
    ) -> Result<Pending<Vec<T>>, Error> {
        let root_rank = self.member(Op::Scatter, "the root", root)?;
        let is_root = self.index() == root;
        let expected = if is_root { count.saturating_mul(self.size()) } else { 0 };
        let source = values.unwrap_or_default();
        if source.len() != expected {
            let expected = format!("{expected}: {count} for each of {} members", self.size());
            return Err(self.bad_count(Op::Scatter, "the input", source.len(), expected));
        }
        let call = Call::new(Op::Scatter, tag).elements::<T>(count).root(root_rank);
        let work = move |all| Ok(Copies::dealt_by(all, root, count));
        let start = self.index() * count;
        let target = Some(self.room(&call, count, "its output")?);
        self.issue(call, Exchange { source, target }, work, |mine| {
            let own = mine.source.get(start..start + count).map(<[T]>::to_vec);
            let target = mine.target.unwrap_or_default();
            (bytes::<T>(if is_root { 0 } else { count }), own.unwrap_or(target))
        })
    }

    /// Member `i` gets the part that each member cut for it, in member order.
    ///
    /// `values`: `[sum of send_counts]`; output `[sum of receive_counts]`. `send_counts[i]` elements go to member
    /// `i`, `receive_counts[i]` come from it; they may differ, but what one sends is what the other expects, or
    /// all get [`Error::CollectiveMismatch`].
    ///
    /// # Errors
    /// [`Error::BadCount`] if there is not one count for each member, they do not add up to the elements, or the member
    /// does not expect from itself what it sends.
    pub fn all_to_all<T: Element>(
        &self,
        tag: Tag,
        values: Vec<T>,
        send_counts: Vec<usize>,
        receive_counts: Vec<usize>,
    ) -> Result<Pending<Vec<T>>, Error> {
        self.check_splits(values.len(), &send_counts, &receive_counts)?;
        let (index, len) = (self.index(), receive_counts.iter().sum());
        let own_start: usize = send_counts[..index].iter().sum();
        let own_at: usize = receive_counts[..index].iter().sum();
        let own = receive_counts[index];
        let call =
            Call::new(Op::AllToAll, tag).splits::<T>(send_counts.clone(), receive_counts.clone());
        let exchange =
            Exchange { source: values, target: Some(self.room(&call, len, "its output")?) };
        let work = |all: Vec<Splits<T>>| {
            let (send, receive): (Vec<_>, Vec<_>) =
                all.iter().map(|it| (it.send.clone(), it.receive.clone())).unzip();
            check_pairs(&send, &receive)?;
            Ok(Copies::split(all.into_iter().map(|it| it.exchange).collect(), &send))
        };
        let deposit = Splits { exchange, send: send_counts, receive: receive_counts };
        self.issue(call, deposit, work, |mine| {
            let mut target = mine.exchange.target.unwrap_or_default();
            target[own_at..own_at + own]
                .copy_from_slice(&mine.exchange.source[own_start..own_start + own]);
            (bytes::<T>(len - own), target)
        })
    }

    fn check_splits(&self, len: usize, send: &[usize], receive: &[usize]) -> Result<(), Error> {
        let (op, size, index) = (Op::AllToAll, self.size(), self.index());
        for (what, counts) in
            [("the list of send counts", send), ("the list of receive counts", receive)]
        {
            if counts.len() != size {
                return Err(self.bad_count(
                    op,
                    what,
                    counts.len(),
                    format!("one for each of {size} members"),
                ));
            }
        }
        if send.iter().sum::<usize>() != len {
            return Err(self.bad_count(
                op,
                "the input",
                len,
                format!("the sum of the send counts {send:?}"),
            ));
        }
        if send[index] != receive[index] {
            let expected = format!("{}: what it sends to itself", send[index]);
            return Err(self.bad_count(
                op,
                "what it expects from itself",
                receive[index],
                expected,
            ));
        }
        Ok(())
    }
}

/// What a member brings to an all_to_all.
struct Splits<T> {
    exchange: Exchange<T>,
    send: Vec<usize>,
    receive: Vec<usize>,
}

/// Whether what each sends is what the other expects.
fn check_pairs(send: &[Vec<usize>], receive: &[Vec<usize>]) -> Result<(), String> {
    for (from, send) in send.iter().enumerate() {
        for (to, receive) in receive.iter().enumerate() {
            if send[to] != receive[from] {
                return Err(format!(
                    "member {from} sends {} elements to member {to}, which expects {},",
                    send[to], receive[from]
                ));
            }
        }
    }
    Ok(())
}
