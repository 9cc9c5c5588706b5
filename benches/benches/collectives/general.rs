//! The general collectives, on f32.

use std::mem;

use hsdp_comm::{Error, Group, Lent, Reduction, Tag};

use crate::case::{Bus, Case, Collective, settled};
use crate::place::{Place, Wrong, brought, check};

const SUM: Reduction = Reduction::Sum;
const ROOT: usize = 0;

pub(crate) const ALL: [Collective; 11] = [
    f32s("all_gather", Bus::OtherParts, |place| {
        let call = |group: &Group, _, lent| settled(group.all_gather_into(tag(), lent));
        lending(place, [place.part, place.whole()], call, Place::gathered)
    }),
    f32s("reduce_scatter", Bus::OtherParts, |place| {
        let call = |group: &Group, _, lent| settled(group.reduce_scatter_into(tag(), SUM, lent));
        let expected = |place: Place, index| place.total(place.rank * place.part + index);
        lending(place, [place.whole(), place.part], call, expected)
    }),
    f32s("all_reduce", Bus::ThereAndBack, |place| {
        let call = |group: &Group, _, values| settled(group.all_reduce(tag(), SUM, values));
        in_place(place, call, Place::total)
    }),
    f32s("broadcast", Bus::Whole, |place| {
        let call = |group: &Group, _, values| settled(group.broadcast(tag(), ROOT, values));
        in_place(place, call, |_, index| brought(ROOT, index))
    }),
    f32s("reduce", Bus::Whole, |place| {
        let call = |group: &Group, place: Place, values: Vec<f32>| {
            // A member's elements are passed on: it copies those that the next call needs.
            let own = (place.rank != ROOT).then(|| values.clone());
            let reduced = settled(group.reduce(tag(), ROOT, SUM, values))?;
            Ok(reduced.or(own).expect("the root has the sum, and the others their own"))
        };
        in_place(place, call, |place, index| match place.rank {
            ROOT => place.total(index),
            rank => brought(rank, index),
        })
    }),
    f32s("gather", Bus::OtherParts, |place| {
        let call = |group: &Group, _, lent| settled(group.gather_into(tag(), ROOT, lent));
        let whole = if place.rank == ROOT { place.whole() } else { 0 };
        lending(place, [place.part, whole], call, Place::gathered)
    }),
    f32s("scatter", Bus::OtherParts, |place| {
        let call = |group: &Group, place: Place, lent: Lent<f32>| {
            // The root's elements are passed on: it copies those that the next call needs.
            let given = (place.rank == ROOT).then(|| lent.source.clone());
            let target = settled(group.scatter(tag(), ROOT, given, place.part))?;
            Ok(Lent { target, ..lent })
        };
        let whole = if place.rank == ROOT { place.whole() } else { 0 };
        let expected = |place: Place, index| brought(ROOT, place.rank * place.part + index);
        lending(place, [whole, place.part], call, expected)
    }),
    f32s("all_to_all", Bus::OtherParts, |place| {
        let call = |group: &Group, place: Place, lent| {
            let counts = vec![place.part; place.ranks];
            settled(group.all_to_all_into(tag(), lent, counts.clone(), counts))
        };
        let expected = |place: Place, index| {
            brought(index / place.part, place.rank * place.part + index % place.part)
        };
        lending(place, [place.whole(), place.whole()], call, expected)
    }),
    f32s("permute", Bus::HandedOver, |place| {
        let call = |group: &Group, place: Place, values| {
            settled(group.permute(tag(), Some(place.next()), values))
        };
        in_place(place, call, from_previous)
    }),
    f32s("send_recv", Bus::HandedOver, |place| {
        let call = |group: &Group, place: Place, values: Vec<f32>| {
            let count = values.len();
            let sent = group.send(tag(), place.next(), values);
            let received = settled(group.recv(tag(), place.previous(), count))?;
            settled(sent)?;
            Ok(received)
        };
        in_place(place, call, from_previous)
    }),
    f32s("barrier", Bus::Empty, |_| Box::new(Barrier)),
];

const fn f32s(name: &'static str, bus: Bus, prepare: fn(Place) -> Box<dyn Case>) -> Collective {
    Collective { name, bus, element: size_of::<f32>(), grain: 1, prepare }
}

fn tag() -> Tag {
    Tag::default()
}

fn from_previous(place: Place, index: usize) -> f32 {
    brought(place.previous(), index)
}

/// What must lie at an index of a rank's output.
type Expected = fn(Place, usize) -> f32;

/// Issues a call with the buffers of a rank, waits, and gives them back.
type Call<B> = fn(&Group, Place, B) -> Result<B, Error>;

/// A call that reads one buffer and fills another.
struct Lending {
    place: Place,
    lent: Lent<f32>,
    call: Call<Lent<f32>>,
    expected: Expected,
}

fn lending(
    place: Place,
    [source, target]: [usize; 2],
    call: Call<Lent<f32>>,
    expected: Expected,
) -> Box<dyn Case> {
    let lent = Lent { source: place.brings(source), target: vec![f32::NAN; target] };
    Box::new(Lending { place, lent, call, expected })
}

impl Case for Lending {
    fn call(&mut self, group: &Group) -> Result<(), Error> {
        let lent = Lent {
            source: mem::take(&mut self.lent.source),
            target: mem::take(&mut self.lent.target),
        };
        self.lent = (self.call)(group, self.place, lent)?;
        Ok(())
    }

    fn check(&self) -> Result<(), Wrong> {
        check(&self.lent.target, |index| (self.expected)(self.place, index))
    }

    fn calm(&mut self) {}
}

/// A call whose result takes the place of what was brought.
struct InPlace {
    place: Place,
    values: Vec<f32>,
    call: Call<Vec<f32>>,
    expected: Expected,
}

fn in_place(place: Place, call: Call<Vec<f32>>, expected: Expected) -> Box<dyn Case> {
    Box::new(InPlace { place, values: place.brings(place.whole()), call, expected })
}

impl Case for InPlace {
    fn call(&mut self, group: &Group) -> Result<(), Error> {
        self.values = (self.call)(group, self.place, mem::take(&mut self.values))?;
        Ok(())
    }

    fn check(&self) -> Result<(), Wrong> {
        check(&self.values, |index| (self.expected)(self.place, index))
    }

    fn calm(&mut self) {
        self.values.fill(0.0);
    }
}

/// A call without elements.
struct Barrier;

impl Case for Barrier {
    fn call(&mut self, group: &Group) -> Result<(), Error> {
        settled(group.barrier(tag()))
    }

    fn check(&self) -> Result<(), Wrong> {
        Ok(())
    }

    fn calm(&mut self) {}
}
