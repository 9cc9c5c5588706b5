//! Where the members of one group meet: its operations, each in a place that its number gives.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;

use crossbeam::utils::CachePadded;

use super::identity::{Company, Number};
use super::operation::Operation;
use super::running::discard;
use crate::Error;
use crate::sync::Mutex;
use crate::work::Work;

/// How many operations of a group have places, at the most.
pub(super) const MOST_PLACES: usize = 1 << 10;

/// How many have at first: members that wait for each other are rarely further apart.
const FIRST_PLACES: usize = 2;

/// How many places are looked at for one that is free.
const LOOKS: usize = 4;

/// The operations of a group at which somebody has arrived and not everybody; and, as memory for others, those that are over.
///
/// Both lie in the same places, so that members of an operation touch as little as possible that others have written.
#[derive(Debug)]
pub(crate) struct Post {
    company: Arc<Company>,
    places: CachePadded<Mutex<Places>>,
}

#[derive(Debug)]
struct Places {
    /// One that gathers is at its sequence number modulo their number, a power of two: which grows when too many are in use.
    places: Vec<Place>,
    most: usize,
    /// Operations that gather and have no place.
    elsewhere: BTreeMap<Number, Arc<Operation>>,
}

#[derive(Debug, Default)]
enum Place {
    #[default]
    Free,
    Gathering(Number, Arc<Operation>),
    /// All have arrived. When all have their outputs, the next one takes its memory.
    Gathered(Arc<Operation>),
}

impl Post {
    /// With at most so many places.
    pub(super) fn new(company: Company, most: usize) -> Self {
        let places = (0..FIRST_PLACES.min(most)).map(|_| Place::Free).collect();
        let places = Places { places, most, elsewhere: BTreeMap::new() };
        Self { company: Arc::new(company), places: CachePadded::new(Mutex::new(places)) }
    }

    /// The operation of a number, made if this is its first member, provided that `admit` lets it.
    ///
    /// `admit` is asked under the lock: an early end that was announced before is seen, and one that is
    /// announced afterwards finds the operation here.
    pub(crate) fn enter<D: Send + 'static, W: Work>(
        &self,
        number: Number,
        admit: impl FnOnce() -> Result<(), Error>,
    ) -> Result<Arc<Operation>, Error> {
        let mut places = self.places.lock();
        if let Some(operation) = places.find(number) {
            return Ok(Arc::clone(operation));
        }
        admit()?;
        let (operation, former) = places.make::<D, W>(&self.company, number);
        drop(places);
        // It may hold what is the users': without the lock.
        discard(former);
        Ok(operation)
    }

    /// An operation gathers again, provided that `admit` lets it, which is asked as in [`enter`](Self::enter).
    pub(super) fn readmit(
        &self,
        operation: &Arc<Operation>,
        admit: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut places = self.places.lock();
        admit()?;
        places.readmit(operation);
        Ok(())
    }

    /// Everybody has arrived, or nobody is to arrive any more.
    pub(crate) fn remove(&self, number: Number) {
        let removed = self.places.lock().remove(number);
        drop(removed);
    }

    /// A member goes without its output: the operation will not be over.
    pub(super) fn forsake(&self, operation: &Arc<Operation>) {
        let forsaken = self.places.lock().forsake(operation);
        drop(forsaken);
    }

    /// Takes out the operations of `epoch`, or of all.
    pub(super) fn drain(&self, epoch: Option<u64>) -> Vec<Arc<Operation>> {
        let matches = |number: &Number| epoch.is_none_or(|epoch| number.epoch == epoch);
        let mut places = self.places.lock();
        let elsewhere = places.elsewhere.extract_if(.., |number, _| matches(number));
        let mut drained: Vec<_> = elsewhere.map(|(_, operation)| operation).collect();
        for place in &mut places.places {
            if matches!(place, Place::Gathering(number, _) if matches(number)) {
                drained.extend(mem::take(place).into_operation());
            }
        }
        drained
    }

    /// All operations that are there now.
    pub(super) fn snapshot(&self) -> Vec<Arc<Operation>> {
        let places = self.places.lock();
        let gathering = |place: &Place| match place {
            Place::Gathering(_, operation) => Some(Arc::clone(operation)),
            _ => None,
        };
        let elsewhere = places.elsewhere.values().cloned();
        places.places.iter().filter_map(gathering).chain(elsewhere).collect()
    }
}

impl Places {
    /// The operation of a number, while it gathers.
    fn find(&self, number: Number) -> Option<&Arc<Operation>> {
        match self.places.get(self.index(number)) {
            Some(Place::Gathering(it, operation)) if *it == number => Some(operation),
            _ if self.elsewhere.is_empty() => None,
            _ => self.elsewhere.get(&number),
        }
    }

    /// An operation that gathers, and what has given way to it.
    fn make<D: Send + 'static, W: Work>(
        &mut self,
        company: &Arc<Company>,
        number: Number,
    ) -> (Arc<Operation>, Place) {
        let Some(index) = self.make_room(number) else {
            let operation = Arc::new(Operation::new::<D, W>(company, number));
            self.elsewhere.insert(number, Arc::clone(&operation));
            return (operation, Place::Free);
        };
        let mut former = mem::take(&mut self.places[index]);
        let renewed = former.over().map(|over| over.renew::<D, W>(number));
        let operation = renewed.and_then(|()| mem::take(&mut former).into_operation());
        let operation =
            operation.unwrap_or_else(|| Arc::new(Operation::new::<D, W>(company, number)));
        self.places[index] = Place::Gathering(number, Arc::clone(&operation));
        (operation, former)
    }

    /// The place of a number, in which no operation gathers, and none is in use unless all around it are, and there are as many places
    /// as there may be. `None` if another is to gather there, or there are no places.
    fn make_room(&mut self, number: Number) -> Option<usize> {
        loop {
            let index = self.index(number);
            match self.places.get_mut(index)? {
                // More places do not part those that have one sequence number, in two epochs.
                Place::Gathering(other, _) if other.sequence == number.sequence => return None,
                Place::Gathering(..) => {
                    if !self.grow() {
                        return None;
                    }
                }
                _ => {
                    if self.lies_free_near(index) || !self.grow() {
                        return Some(index);
                    }
                }
            }
        }
    }

    /// Whether a place is free or its operation over: if need be, what is in use there changes places with one of those that follow,
    /// which hold the oldest. One that is held for long so needs a place, and not as many as others pass by.
    fn lies_free_near(&mut self, index: usize) -> bool {
        let len = self.places.len();
        let near = (0..LOOKS.min(len)).map(|ahead| (index + ahead) % len);
        let free = near.into_iter().find(|near| self.places[*near].is_free());
        if let Some(free) = free {
            self.places.swap(index, free);
        }
        free.is_some()
    }

    /// Twice as many places; `false` if there are enough.
    fn grow(&mut self) -> bool {
        let len = self.places.len();
        if len * 2 > self.most {
            return false;
        }
        self.places.resize_with(len * 2, Place::default);
        for from in 0..len {
            if let Place::Gathering(number, _) = &self.places[from] {
                let to = self.index(*number);
                self.places.swap(from, to);
            }
        }
        true
    }

    fn remove(&mut self, number: Number) -> Option<Arc<Operation>> {
        let index = self.index(number);
        match self.places.get_mut(index) {
            Some(place) if place.number() == Some(number) => {
                let operation = mem::take(place).into_operation();
                *place = operation.map_or(Place::Free, Place::Gathered);
                None
            }
            _ => self.elsewhere.remove(&number),
        }
    }

    fn readmit(&mut self, operation: &Arc<Operation>) {
        let (number, index) = (operation.number(), self.index(operation.number()));
        match self.places.get_mut(index).filter(|place| place.holds(operation)) {
            Some(place) => *place = Place::Gathering(number, Arc::clone(operation)),
            None => drop(self.elsewhere.insert(number, Arc::clone(operation))),
        }
    }

    /// An operation that will not be over leaves its place.
    fn forsake(&mut self, operation: &Arc<Operation>) -> Option<Arc<Operation>> {
        let place = self.places.iter_mut().find(|place| place.holds(operation))?;
        match mem::take(place) {
            // Those who are still to come look for it.
            Place::Gathering(number, operation) => self.elsewhere.insert(number, operation),
            place => place.into_operation(),
        }
    }

    fn index(&self, number: Number) -> usize {
        index_in(self.places.len(), number.sequence)
    }
}

/// Where a sequence number has its place among `places`, of which there may be none.
fn index_in(places: usize, sequence: u64) -> usize {
    #[expect(clippy::cast_possible_truncation, reason = "the remainder is small")]
    let index = (sequence % places.max(1) as u64) as usize;
    index
}

impl Place {
    /// Whether an operation may be made here.
    fn is_free(&mut self) -> bool {
        match self {
            Self::Free => true,
            Self::Gathering(..) => false,
            Self::Gathered(_) => self.over().is_some(),
        }
    }

    fn number(&self) -> Option<Number> {
        match self {
            Self::Gathering(number, _) => Some(*number),
            _ => None,
        }
    }

    fn holds(&self, operation: &Arc<Operation>) -> bool {
        match self {
            Self::Free => false,
            Self::Gathering(_, it) | Self::Gathered(it) => Arc::ptr_eq(it, operation),
        }
    }

    /// The operation, if nobody else has it any more and all its outputs were taken.
    fn over(&mut self) -> Option<&mut Operation> {
        let Self::Gathered(operation) = self else { return None };
        let operation = Arc::get_mut(operation)?;
        operation.is_over().then_some(operation)
    }

    fn into_operation(self) -> Option<Arc<Operation>> {
        match self {
            Self::Free => None,
            Self::Gathering(_, operation) | Self::Gathered(operation) => Some(operation),
        }
    }
}
