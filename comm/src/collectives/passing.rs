//! permute, send and recv, barrier.

use hsdp_kernels::Element;

use crate::call::Call;
use crate::execute::Vectors;
use crate::{Error, Group, Op, Pending, Tag};

/// # Collectives that pass vectors on
///
/// Between ranks that share memory, the vector itself changes its owner, and nothing is copied. permute and barrier are
/// **collective**, as the collectives that move elements. A transfer involves only its two members: the transfers from one
/// member to another are a sequence of their own, in which the n-th [`send`](Self::send) meets the n-th [`recv`](Self::recv).
impl Group {
    /// Sends this member's elements to member `destination`, or to no member. Gets the elements of the member that sends to
    /// this one, or zeros if there is none.
    ///
    /// `values`: `[n]`; output `[n]`. Two members with the same destination are a mismatch, on all members.
    ///
    /// # Errors
    /// [`Error::Refused`] if there is no member `destination`.
    pub fn permute<T: Element>(
        &self,
        tag: Tag,
        destination: Option<usize>,
        values: Vec<T>,
    ) -> Result<Pending<Vec<T>>, Error> {
        if let Some(destination) = destination {
            self.member(Op::Permute, "the destination", destination)?;
        }
        let call = Call::new(Op::Permute, tag).elements::<T>(values.len());
        self.issue(call, Vectors::handed(values, destination))
    }

    /// Sends elements to member `to`, which calls [`recv`](Self::recv). Complete when that call is issued: the receiver
    /// owns the elements then, whether or not it has waited for them.
    ///
    /// `values`: `[n]`. A member may send to itself.
    ///
    /// # Errors
    /// [`Error::Refused`] if there is no member `to`.
    pub fn send<T: Element>(
        &self,
        tag: Tag,
        to: usize,
        values: Vec<T>,
    ) -> Result<Pending<()>, Error> {
        let peer = self.member(Op::Send, "the destination", to)?;
        let call = Call::new(Op::Send, tag).elements::<T>(values.len()).peer(peer);
        let own = Vectors::handed(values, Some(1));
        let ticket = self.transfer(call, [self.rank(), peer], own)?;
        Ok(ticket.map_or_else(|| Pending::ready(()), Pending::issued::<Vectors<T>>))
    }

    /// Receives the elements that member `from` sends with [`send`](Self::send).
    ///
    /// Output `[count]`; the sender must send as many.
    ///
    /// # Errors
    /// [`Error::Refused`] if there is no member `from`; [`Error::OutOfMemory`] if the rank has no peers, and no memory for the output.
    pub fn recv<T: Element>(
        &self,
        tag: Tag,
        from: usize,
        count: usize,
    ) -> Result<Pending<Vec<T>>, Error> {
        let peer = self.member(Op::Recv, "the source", from)?;
        let call = Call::new(Op::Recv, tag).elements::<T>(count).peer(peer);
        let own = Vectors::<T>::handed(Vec::new(), None);
        match self.transfer(call, [peer, self.rank()], own)? {
            Some(ticket) => Ok(Pending::issued::<Vectors<T>>(ticket)),
            None => Ok(Pending::ready(self.room(Op::Recv, tag, count)?)),
        }
    }

    /// Completes when every member has issued it. To wait for the others, call [`Pending::wait`].
    ///
    /// # Errors
    /// As the collectives that move elements.
    pub fn barrier(&self, tag: Tag) -> Result<Pending<()>, Error> {
        self.issue(Call::new(Op::Barrier, tag), Vectors::<f32>::nothing())
    }
}
