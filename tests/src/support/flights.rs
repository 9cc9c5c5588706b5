//! Operations of a model's steps and evaluations: as a flight record has them, and as the machine
//! of the step says.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use hsdp_comm::{Channel, FlightRecord, ModelLabel, Op, Stage, Tag};
use hsdp_sharding::step::{Exchange, Kind, Members};
use hsdp_sharding::{Axis, DType, Plan, Rank};

use crate::support::machines::Placed;

/// An operation of a rank.
#[derive(Clone, PartialEq, Eq)]
pub struct Flight {
    /// Its channel.
    pub channel: Channel,
    /// Its members.
    pub members: Vec<Rank>,
    /// Its kind.
    pub op: Op,
    /// Dtype of its elements.
    pub dtype: Option<DType>,
    /// Number of its elements.
    pub elements: usize,
    /// Its step, microbatch, stage and unit.
    pub tag: Tag,
}

impl fmt::Debug for Flight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { channel, members, op, dtype, elements, tag } = self;
        let members: Vec<usize> = members.iter().map(|rank| rank.index()).collect();
        write!(f, "{op:?} of {elements} {dtype:?} on {channel:?} of {members:?} ({tag})")
    }
}

/// Operations by channel.
pub type Flown = BTreeMap<&'static str, Vec<Flight>>;

/// Returns the operations of each channel, in the order of their issue.
#[must_use]
pub fn by_channel(flights: Vec<Flight>) -> Flown {
    let mut flown = Flown::new();
    for flight in flights {
        flown.entry(flight.channel.name()).or_default().push(flight);
    }
    flown
}

/// Returns the first operation of a channel that differs: as it flew, and as expected.
#[must_use]
pub fn first_difference(flown: &Flown, expected: &Flown) -> Option<String> {
    let channels: BTreeSet<&str> = flown.keys().chain(expected.keys()).copied().collect();
    channels.into_iter().find_map(|channel| {
        let [flown, expected] =
            [flown, expected].map(|it| it.get(channel).map_or(&[][..], |it| it));
        difference_of(flown, expected).map(|it| format!("{channel} {it}"))
    })
}

/// Returns the first item that differs: its place, as it was found, and as expected.
#[must_use]
pub fn difference_of<T: PartialEq + fmt::Debug>(found: &[T], expected: &[T]) -> Option<String> {
    let at = (0..found.len().max(expected.len())).find(|at| found.get(*at) != expected.get(*at))?;
    Some(format!("{at}: found {:?}, expected {:?}", found.get(at), expected.get(at)))
}

/// Returns the operations that a rank issued in the steps and evaluations of the first model.
///
/// # Panics
/// If the record has forgotten some.
#[must_use]
pub fn of_model(record: &FlightRecord) -> Vec<Flight> {
    assert_eq!(record.overwritten, 0, "the ring holds all operations");
    let members = |entry: &hsdp_comm::FlightEntry| {
        let group = record.groups.iter().find(|group| group.id == entry.group);
        group.expect("the record lists the group").ranks.clone()
    };
    let of_model = record.entries.iter().filter(|entry| entry.tag.model == Some(ModelLabel::FIRST));
    let flight = |entry: &hsdp_comm::FlightEntry| Flight {
        channel: entry.channel,
        members: members(entry),
        op: entry.op,
        dtype: entry.dtype,
        elements: entry.elements,
        tag: entry.tag,
    };
    of_model.map(flight).collect()
}

/// Returns the operations that a rank issues, as its machine says.
#[must_use]
pub fn expected(plan: &Plan, rank: Rank, said: &[Placed]) -> Vec<Flight> {
    let flight = |placed: &Placed| {
        let call = placed.output.call(plan)?;
        let (channel, op, stage) = kind(call.kind);
        let tag = Tag { step: placed.step, microbatch: placed.microbatch, ..Tag::new(stage) };
        Some(Flight {
            channel,
            members: members(plan, rank, call.members),
            op,
            dtype: Some(call.dtype),
            elements: call.elements,
            tag: Tag { unit: call.unit, ..tag }.model(ModelLabel::FIRST),
        })
    };
    said.iter().filter_map(flight).collect()
}

/// Returns the ranks that take part in an operation of a rank.
#[must_use]
pub fn members(plan: &Plan, rank: Rank, members: Members) -> Vec<Rank> {
    match members {
        Members::Shard => plan.mesh().group(Axis::Shard, rank),
        Members::Replicate => plan.mesh().group(Axis::Replicate, rank),
        Members::World => plan.mesh().ranks().collect(),
    }
}

fn kind(kind: Kind) -> (Channel, Op, Stage) {
    match kind {
        Kind::Gather => (Channel::Gather, Op::AllGather, Stage::Gather),
        Kind::ReduceScatter => (Channel::Reduce, Op::ReduceScatter, Stage::Reduce),
        Kind::AllReduce => (Channel::AllReduce, Op::AllReduce, Stage::AllReduce),
        Kind::ScatterSums => (Channel::AllReduce, Op::ReduceScatter, Stage::ScatterSums),
        Kind::GatherSlices => (Channel::AllReduce, Op::AllGather, Stage::GatherSlices),
        Kind::Statistics => (Channel::Statistics, Op::AllReduce, Stage::Statistics),
        Kind::Exchange(exchange) => (Channel::Control, Op::AllGather, stage(exchange)),
    }
}

fn stage(exchange: Exchange) -> Stage {
    match exchange {
        Exchange::Headers
        | Exchange::Samples
        | Exchange::Microbatch(_)
        | Exchange::Unit { .. }
        | Exchange::Weights => Stage::Header,
        Exchange::Replicas => Stage::Setup,
        Exchange::Interim { .. } | Exchange::Statement => Stage::Agreement,
        Exchange::Batch(_) | Exchange::Mean => Stage::Evaluation,
    }
}
