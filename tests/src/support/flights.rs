//! Operations of a step: as a flight record has them, and as the simulator does.

use std::collections::{BTreeMap, BTreeSet};

use hsdp_comm::{Channel, FlightRecord, Op};
use hsdp_sharding::{Axis, DType, Plan, Rank};
use hsdp_simulator::{Members, Order};

/// An operation: its channel, its members, its kind, the dtype and the number of its elements, and its tag in words.
pub type Operation = (Channel, Vec<Rank>, Op, Option<DType>, usize, String);

/// Operations by channel.
pub type Flown = BTreeMap<&'static str, Vec<Operation>>;

/// The operations of a rank, in the order of their issue.
#[derive(Debug)]
pub struct Issued(pub Vec<Operation>);

impl Issued {
    /// The operations of each channel.
    #[must_use]
    pub fn by_channel(self) -> Flown {
        let mut flown = Flown::new();
        for operation in self.0 {
            flown.entry(operation.0.name()).or_default().push(operation);
        }
        flown
    }

    /// Those of gathers, reductions and all-reduces.
    #[must_use]
    pub fn of_units(self) -> Vec<Operation> {
        self.0.into_iter().filter(|operation| operation.0 != Channel::Control).collect()
    }
}

/// The first operation of a channel that differs: as it flew, and as expected.
#[must_use]
pub fn first_difference(flown: &Flown, expected: &Flown) -> Option<String> {
    let channels: BTreeSet<&str> = flown.keys().chain(expected.keys()).copied().collect();
    channels.into_iter().find_map(|channel| {
        let [flown, expected] =
            [flown, expected].map(|it| it.get(channel).map_or(&[][..], |it| it));
        let at =
            (0..flown.len().max(expected.len())).find(|at| flown.get(*at) != expected.get(*at))?;
        Some(format!("{channel} {at}: flew {:?}, expected {:?}", flown.get(at), expected.get(at)))
    })
}

/// The operations that a rank issued in a step.
///
/// # Panics
/// If the record has forgotten some.
#[must_use]
pub fn of_step(record: &FlightRecord, step: u64) -> Issued {
    assert_eq!(record.overwritten, 0, "the ring holds all operations");
    let group = |entry: &hsdp_comm::FlightEntry| {
        let group = record.groups.iter().find(|group| group.id == entry.group);
        group.expect("the record lists the group").ranks.clone()
    };
    let entries = record.entries.iter().filter(|entry| entry.tag.step == step);
    let issued =
        entries.map(|it| (it.channel, group(it), it.op, it.dtype, it.elements, it.tag.to_string()));
    Issued(issued.collect())
}

/// The operations that a rank issues in a step, as the simulator says.
#[must_use]
pub fn expected(plan: &Plan, rank: Rank, step: u64, order: &Order) -> Issued {
    let members = |members| match members {
        Members::Shard => plan.mesh().group(Axis::Shard, rank),
        Members::Replicate => plan.mesh().group(Axis::Replicate, rank),
        Members::World => plan.mesh().ranks().collect(),
    };
    let operations = order.operations().map(|(microbatch, it)| {
        let microbatch = usize::try_from(microbatch).expect("a few");
        let (dtype, tag) = (Some(it.dtype), it.tag(step, microbatch).to_string());
        (it.channel, members(it.members), it.op, dtype, it.elements, tag)
    });
    Issued(operations.collect())
}
