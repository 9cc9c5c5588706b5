//! What the members of an operation bring and get, each in its slot: with the type of the work erased, and kept for the next
//! operation of the group, which is likely to be of the same work.

use std::any::Any;
use std::mem;
use std::sync::Arc;

use super::operation::Operation;
use crate::Descriptor;
use crate::sync::Mutex;
use crate::work::{Deposits, Meter, Outputs, Work};

/// The slots of one operation, and its work.
pub(crate) struct Slots<D, W: Work> {
    /// What members said when they came.
    arrivals: Vec<Option<Arc<Descriptor>>>,
    /// There while blocks are run.
    work: Option<W>,
    /// Never locked: whoever reaches them has all slots to itself. What members bring and get need not be `Sync`.
    goods: Mutex<Goods<D, W>>,
}

struct Goods<D, W: Work> {
    deposits: Vec<Option<D>>,
    outputs: Outputs<W::Output>,
    /// Of the work before.
    lists: W::Lists,
}

impl<D, W: Work> Slots<D, W> {
    pub(crate) fn new(members: usize) -> Box<Self> {
        let goods = Goods {
            deposits: none(members),
            outputs: Outputs::default(),
            lists: W::Lists::default(),
        };
        Box::new(Self { arrivals: none(members), work: None, goods: Mutex::new(goods) })
    }

    /// A member lays down what it brings, which is there.
    pub(crate) fn put(&mut self, slot: usize, deposit: Option<D>) {
        self.goods.get_mut().deposits[slot] = deposit;
    }

    /// Makes the work of what all have brought.
    ///
    /// # Errors
    /// What `assemble` says is wrong with it. Then nothing is left of it, but for what members said.
    pub(crate) fn assemble(
        &mut self,
        assemble: impl FnOnce(W::Lists, Deposits<'_, D>) -> Result<W, String>,
    ) -> Result<(), String> {
        let Goods { deposits, lists, .. } = self.goods.get_mut();
        let work = assemble(mem::take(lists), Deposits::of(deposits));
        deposits.fill_with(|| None);
        self.work = Some(work?);
        self.arrivals.fill_with(|| None);
        Ok(())
    }

    /// A member's output, when the work is finished.
    pub(crate) fn take_output(&mut self, slot: usize) -> Option<W::Output> {
        self.goods.get_mut().outputs.slot(slot).take()
    }

    /// What the work before has left.
    pub(crate) fn take_lists(&mut self) -> W::Lists {
        mem::take(&mut self.goods.get_mut().lists)
    }

    fn work(&self) -> &W {
        self.work.as_ref().expect("it was assembled")
    }
}

fn none<T>(count: usize) -> Vec<Option<T>> {
    (0..count).map(|_| None).collect()
}

impl<D: Send + 'static, W: Work> Slots<D, W> {
    /// Slots with their type, if it is that.
    pub(crate) fn typed(slots: Box<dyn AnySlots>) -> Option<Box<Self>> {
        (slots as Box<dyn Any>).downcast().ok()
    }

    /// The same, of slots of others.
    pub(crate) fn typed_mut(slots: &mut dyn AnySlots) -> Option<&mut Self> {
        (slots as &mut dyn Any).downcast_mut()
    }

    /// Makes slots at which nobody has come into some for this work.
    pub(crate) fn make_fit(slots: &mut Box<dyn AnySlots>) {
        if Self::typed_mut(&mut **slots).is_none() {
            let members = slots.arrivals().len();
            *slots = Self::new(members);
        }
    }

    /// Slots of an operation that is over, if they are of the same work, for another one.
    pub(crate) fn cleared(slots: Box<dyn AnySlots>) -> Option<Box<Self>> {
        let mut slots = Self::typed(slots)?;
        slots.goods.get_mut().outputs.clear();
        Some(slots)
    }
}

/// Has an operation gather again whose blocks were run, with what they have left: its members bring something to another round.
pub(crate) trait Again: Send + Sync {
    fn again(self: Arc<Self>, operation: &Arc<Operation>, slots: Box<dyn AnySlots>);
}

/// [`Slots`] with the type of the work erased.
pub(crate) trait AnySlots: Any + Send + Sync {
    /// What members said, by slot; nothing once the work is there.
    fn arrivals(&mut self) -> &mut [Option<Arc<Descriptor>>];
    /// As those of [`Work`].
    fn blocks(&self) -> usize;
    fn bytes(&self) -> usize;
    fn calls_users(&self) -> bool;
    fn run(&self, block: usize, meter: &Meter<'_>);
    /// Every block was run: nothing is left but the outputs, or what goes on to be gathered again.
    fn finish(&mut self) -> Option<Arc<dyn Again>>;
    /// An `Option` of the output of a member.
    fn output(&mut self, slot: usize) -> &mut dyn Any;
}

impl<D: Send + 'static, W: Work> AnySlots for Slots<D, W> {
    fn arrivals(&mut self) -> &mut [Option<Arc<Descriptor>>] {
        &mut self.arrivals
    }

    fn blocks(&self) -> usize {
        self.work().blocks()
    }

    fn bytes(&self) -> usize {
        self.work().bytes()
    }

    fn calls_users(&self) -> bool {
        self.work().calls_users()
    }

    fn run(&self, block: usize, meter: &Meter<'_>) {
        self.work().run(block, meter);
    }

    fn finish(&mut self) -> Option<Arc<dyn Again>> {
        let work = self.work.take().expect("it was assembled");
        let again = work.again();
        let Goods { outputs, lists, .. } = self.goods.get_mut();
        *lists = work.finish(outputs);
        again
    }

    fn output(&mut self, slot: usize) -> &mut dyn Any {
        self.goods.get_mut().outputs.slot(slot)
    }
}
