//! A step as execution traces of MLCommons Chakra, schema 0.0.4: a file a rank, and the list of
//! groups that ASTRA-sim reads beside them.

use std::collections::BTreeMap;
use std::io::{self, Write};

use hsdp_flight::{Channel, Op, Stage};
use hsdp_sharding::{Axis, Rank};
use prost::Message;

use super::{Traces, name_of_operation, name_of_work};
use crate::Time;
use crate::host::{
    Action, IssuedHandles, Members, ModelPlacement, Reference, StepBlock, StepOperation, Work,
};
use crate::simulation::{Lane, STREAMS, stream};

/// The channels whose groups are axes of the mesh.
const CHANNELS: [(Channel, Axis, Members); 3] = [
    (Channel::Gather, Axis::Shard, Members::Shard),
    (Channel::Reduce, Axis::Shard, Members::Shard),
    (Channel::AllReduce, Axis::Replicate, Members::Replicate),
];

impl Traces<'_> {
    /// Writes the trace of a rank: its nodes in the order in which the host makes them, each after
    /// the nodes that it depends on. The memory that it takes does not depend on the number of
    /// microbatches. ASTRA-sim expects the file to be called `NAME.RANK.et`.
    ///
    /// # Errors
    /// Errors of the sink, which is written node by node; [`io::ErrorKind::InvalidInput`] for an
    /// operation that no step has.
    ///
    /// # Panics
    /// If the mesh does not [contain](hsdp_sharding::Mesh::contains) the rank.
    pub fn write_chakra(&self, rank: Rank, sink: &mut impl Write) -> io::Result<()> {
        let mut nodes = Nodes::begin(sink)?;
        let mut walk = Walk::new(self.order.placement);
        for block in &self.order.blocks {
            let mut prepared = self.prepare(rank, block)?;
            for _ in 0..block.times {
                walk.block(block, &mut prepared, &mut nodes)?;
            }
        }
        Ok(())
    }

    /// Writes the groups that the traces name, as ASTRA-sim's `--comm-group-configuration` expects
    /// them: numbers with lists of ranks. Group 0 has all ranks, and is not listed, as ASTRA-sim
    /// demands. A group stands for one sequence of operations, so where the model is in host
    /// memory, ranks that gather and reduce are two groups.
    ///
    /// # Errors
    /// Errors of the sink.
    pub fn write_chakra_groups(&self, sink: &mut impl Write) -> io::Result<()> {
        let mesh = self.order.mesh;
        let mut groups: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
        for (channel, axis, members) in CHANNELS {
            for rank in mesh.ranks().filter(|_| mesh.axis_size(axis) > 1) {
                let ranks = mesh.members(axis, rank).map(Rank::get);
                groups.insert(self.group(channel, members, rank), ranks.collect());
            }
        }
        serde_json::to_writer(sink, &groups).map_err(io::Error::from)
    }

    /// Returns the number of a rank's group for operations of a channel.
    fn group(&self, channel: Channel, members: Members, rank: Rank) -> usize {
        let mesh = self.order.mesh;
        let at = self.order.mesh.coordinate(rank);
        let [replicate, shard] = [mesh.replicate_size(), mesh.shard_size()];
        match (members, channel, self.order.placement) {
            (Members::World, ..) => 0,
            (Members::Replicate, ..) => 1 + replicate + at.shard_index,
            (Members::Shard, Channel::Reduce, ModelPlacement::Host) => {
                1 + replicate + shard + at.replicate_index
            }
            (Members::Shard, ..) => 1 + at.replicate_index,
        }
    }

    /// Returns the nodes of a rank's block.
    fn prepare(&self, rank: Rank, block: &StepBlock) -> io::Result<BlockNodes> {
        let operations = block.operations.iter().map(|it| self.operation(rank, it));
        let work = |action: &Action| match action {
            Action::Compute(work) => Some(self.work(*work)),
            _ => None,
        };
        let works = block.actions.iter().map(work).collect();
        Ok(BlockNodes { operations: operations.collect::<io::Result<_>>()?, works })
    }

    fn operation(&self, rank: Rank, operation: &StepOperation) -> io::Result<PreparedOperation> {
        let members = operation.members;
        let mesh = self.order.mesh;
        let first = match members {
            Members::Shard => mesh.members(Axis::Shard, rank).next(),
            Members::Replicate => mesh.members(Axis::Replicate, rank).next(),
            Members::World => None,
        };
        let shape = self.costs.shape(members, first.unwrap_or(Rank::new(0)));
        let cost = self.costs.operation(operation, shape);
        let name = name_of_operation(self.spec, operation);
        let call = computation(format!("issue {name}"), Lane::Host, cost.host);
        let lane = lane(operation.channel, self.order.placement);
        let count = members.count(mesh);
        let moves = count > 1 && operation.bytes() > 0;
        let group = self.group(operation.channel, members, rank);
        let attributes = attributes(operation, count, group)?;
        let node = Node { name, kind: NodeType::Collective.into(), attributes, ..Node::default() };
        let collective = moves.then_some(Template { node, lane, time: cost.link });
        let is_exchange = matches!(operation.channel, Channel::Control | Channel::Statistics);
        Ok(PreparedOperation { lane, is_exchange, call, collective })
    }

    fn work(&self, work: Work) -> PreparedWork {
        let name = name_of_work(self.spec, work);
        let cost = self.costs.work(work);
        match self.order.placement {
            ModelPlacement::Host => {
                PreparedWork { host: computation(name, Lane::Host, cost.host), device: None }
            }
            ModelPlacement::Device => {
                let host = computation(format!("launch {name}"), Lane::Host, cost.host);
                let device = computation(name, Lane::Computation, cost.device);
                PreparedWork { host, device: Some(device) }
            }
        }
    }
}

/// The last node of each lane that something follows; 0 stands for none. The nodes of a lane are in
/// order, so the last one stands for all.
#[derive(Clone, Copy, Debug, Default)]
struct After([u64; After::LANES]);

impl After {
    /// A thread, a device, and the streams.
    const LANES: usize = 2 + STREAMS;

    /// Returns the place of a lane.
    const fn place(lane: Lane) -> usize {
        match lane {
            Lane::Host => 0,
            Lane::Computation => 1,
            Lane::Collectives(stream) => 2 + stream,
        }
    }

    /// After this node alone.
    fn node(lane: Lane, id: u64) -> Self {
        let mut after = Self::default();
        after.0[Self::place(lane)] = id;
        after
    }

    /// After those of one lane.
    fn only(self, lane: Lane) -> Self {
        Self::node(lane, self.0[Self::place(lane)])
    }

    /// After those of the other one, too.
    fn and(self, other: Self) -> Self {
        Self(std::array::from_fn(|lane| self.0[lane].max(other.0[lane])))
    }

    /// Returns the identifiers.
    fn ids(self) -> impl Iterator<Item = u64> {
        self.0.into_iter().filter(|id| *id > 0)
    }
}

/// The first message of a file.
#[derive(Clone, PartialEq, prost::Message)]
struct GlobalMetadata {
    #[prost(string, tag = "1")]
    version: String,
}

/// A node.
#[derive(Clone, PartialEq, prost::Message)]
struct Node {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(string, tag = "2")]
    name: String,
    #[prost(enumeration = "NodeType", tag = "3")]
    kind: i32,
    #[prost(uint64, repeated, tag = "5")]
    data_deps: Vec<u64>,
    #[prost(uint64, tag = "7")]
    duration_micros: u64,
    #[prost(message, repeated, tag = "10")]
    attributes: Vec<Attribute>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
enum NodeType {
    Invalid = 0,
    Computation = 4,
    Collective = 7,
}

/// The kind of a collective, as the attribute `comm_type` has it.
#[derive(Clone, Copy, Debug)]
#[repr(i64)]
enum CollectiveType {
    AllReduce = 0,
    AllGather = 2,
    ReduceScatter = 7,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Attribute {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(oneof = "AttributeValue", tags = "9, 27, 29")]
    value: Option<AttributeValue>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum AttributeValue {
    #[prost(int64, tag = "9")]
    Integer(i64),
    #[prost(bool, tag = "27")]
    Bool(bool),
    #[prost(string, tag = "29")]
    Text(String),
}

impl Attribute {
    fn new(name: &str, value: AttributeValue) -> Self {
        Self { name: name.to_owned(), value: Some(value) }
    }
}

/// The version of the schema.
const VERSION: &str = "0.0.4";

/// Picoseconds of a microsecond, the unit of durations.
const MICROSECOND: u64 = 1_000_000;

/// The nodes of a file that is written.
struct Nodes<'a, W> {
    sink: &'a mut W,
    /// The identifier of the last one; they begin at 1.
    last: u64,
    /// Time of a lane's nodes. Their sum is rounded, not each duration, so errors do not add up.
    times: [Time; After::LANES],
    buffer: Vec<u8>,
}

/// A node that repeats: all of it but its identifier, its duration and the nodes that it follows.
#[derive(Debug)]
struct Template {
    node: Node,
    lane: Lane,
    time: Time,
}

impl<'a, W: Write> Nodes<'a, W> {
    /// Begins a file.
    fn begin(sink: &'a mut W) -> io::Result<Self> {
        let mut nodes =
            Self { sink, last: 0, times: [Time::ZERO; After::LANES], buffer: Vec::new() };
        nodes.write(&GlobalMetadata { version: VERSION.to_owned() })?;
        Ok(nodes)
    }

    /// Adds a node behind others.
    fn add(&mut self, template: &mut Template, after: After) -> io::Result<After> {
        let Template { node, lane, time } = template;
        self.last += 1;
        let passed = &mut self.times[After::place(*lane)];
        let begins = micros(*passed);
        *passed += *time;
        node.id = self.last;
        node.duration_micros = micros(*passed) - begins;
        node.data_deps.clear();
        node.data_deps.extend(after.ids());
        self.write(node)?;
        Ok(After::node(*lane, self.last))
    }

    fn write(&mut self, message: &impl Message) -> io::Result<()> {
        self.buffer.clear();
        message.encode_length_delimited(&mut self.buffer).map_err(io::Error::other)?;
        self.sink.write_all(&self.buffer)
    }
}

/// Rounded to the nearest.
const fn micros(time: Time) -> u64 {
    time.picoseconds().saturating_add(MICROSECOND / 2) / MICROSECOND
}

/// The nodes of a block.
struct BlockNodes {
    /// Nodes of each operation.
    operations: Vec<PreparedOperation>,
    /// Nodes of each action that computes.
    works: Vec<Option<PreparedWork>>,
}

struct PreparedOperation {
    lane: Lane,
    is_exchange: bool,
    /// The part of the host.
    call: Template,
    /// The operation; none if it moves nothing.
    collective: Option<Template>,
}

struct PreparedWork {
    /// The part of the host.
    host: Template,
    /// The part of the device; none where the host computes.
    device: Option<Template>,
}

/// Returns the stream of an operation. On a device, exchanges and statistics are in the stream of
/// all others: ASTRA-sim has one communication of a rank at a time, so without this order two ranks
/// could begin different ones, and wait for each other.
fn lane(channel: Channel, placement: ModelPlacement) -> Lane {
    let channel = if placement == ModelPlacement::Device { Channel::Gather } else { channel };
    Lane::Collectives(stream(channel, placement))
}

fn computation(name: String, lane: Lane, time: Time) -> Template {
    let is_on_host = Attribute::new("is_cpu_op", AttributeValue::Bool(lane == Lane::Host));
    let kind = NodeType::Computation.into();
    let attributes = vec![is_on_host];
    Template { node: Node { name, kind, attributes, ..Node::default() }, lane, time }
}

/// `comm_size` is the number of bytes that each member puts in, as ASTRA-sim takes it: the shard of
/// an all-gather, and the whole input of a reduce-scatter. Slices of `members` replicas are listed
/// as if they had one length.
fn attributes(
    operation: &StepOperation,
    members: usize,
    group: usize,
) -> io::Result<Vec<Attribute>> {
    let kind = match operation.op {
        Op::AllGather => CollectiveType::AllGather,
        Op::ReduceScatter => CollectiveType::ReduceScatter,
        Op::AllReduce => CollectiveType::AllReduce,
        op => {
            let refusal = format!("{op} is no operation of a step");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, refusal));
        }
    };
    let bytes = match operation.stage {
        Stage::GatherSlices => operation.bytes().div_ceil(members as u64),
        _ => operation.bytes(),
    };
    let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
    Ok(vec![
        Attribute::new("is_cpu_op", AttributeValue::Bool(false)),
        Attribute::new("comm_type", AttributeValue::Integer(kind as i64)),
        Attribute::new("comm_size", AttributeValue::Integer(bytes)),
        Attribute::new("pg_name", AttributeValue::Text(group.to_string())),
    ])
}

/// The state of a rank between two actions.
struct Walk {
    placement: ModelPlacement,
    /// The nodes that the next action of the thread follows.
    host: After,
    /// The nodes that the next computation follows.
    computation: After,
    /// The last operation of each stream.
    streams: After,
    issued: IssuedHandles<After>,
}

/// A block that is walked through.
struct BlockWalk<'a, 's, W> {
    walk: &'a mut Walk,
    block: &'a StepBlock,
    prepared: &'a mut BlockNodes,
    nodes: &'a mut Nodes<'s, W>,
    /// How many of [`StepBlock::all_reduces`] were.
    all_reduces: usize,
}

impl Walk {
    fn new(placement: ModelPlacement) -> Self {
        let [host, computation, streams] = [After::default(); 3];
        Self { placement, host, computation, streams, issued: IssuedHandles::default() }
    }

    /// Adds the nodes of a block, once.
    fn block<W: Write>(
        &mut self,
        block: &StepBlock,
        prepared: &mut BlockNodes,
        nodes: &mut Nodes<'_, W>,
    ) -> io::Result<()> {
        self.issued.begin(block);
        let mut step = BlockWalk { walk: self, block, prepared, nodes, all_reduces: 0 };
        for (place, action) in block.actions.iter().enumerate() {
            step.act(place, *action)?;
        }
        self.issued.end(block);
        Ok(())
    }

    fn is_on_host(&self) -> bool {
        self.placement == ModelPlacement::Host
    }
}

impl<W: Write> BlockWalk<'_, '_, W> {
    fn act(&mut self, place: usize, action: Action) -> io::Result<()> {
        match action {
            Action::Issue(index) => self.issue(index, After::default())?,
            Action::IssueReady => self.issue_ready()?,
            Action::Need(reference) => self.need(reference),
            Action::Settle(reference) if self.walk.is_on_host() => self.need(reference),
            Action::Settle(_) => {}
            Action::Read => self.walk.host = self.walk.host.and(self.walk.computation),
            Action::Compute(_) => self.compute(place)?,
        }
        Ok(())
    }

    /// Issues an operation, unless it was. It begins behind the one before on its stream, and
    /// behind the computation so far.
    fn issue(&mut self, index: usize, behind: After) -> io::Result<()> {
        if self.is_issued(Reference::Here(index)) {
            return Ok(());
        }
        let walk = &mut *self.walk;
        let operation = &mut self.prepared.operations[index];
        if operation.call.time > Time::ZERO {
            walk.host = self.nodes.add(&mut operation.call, walk.host)?;
            if walk.is_on_host() {
                walk.computation = walk.host;
            }
        }
        let stream = walk.streams.only(operation.lane);
        let mut after = walk.host.and(walk.computation).and(behind).and(stream);
        if let Some(collective) = &mut operation.collective {
            after = self.nodes.add(collective, after)?;
            walk.streams = walk.streams.and(after);
        }
        walk.issued.set(index, after);
        Ok(())
    }

    /// Issues all-reduces. The runtime issues those whose reduce-scatters are complete, which a
    /// graph cannot say. Here, as on devices, each is issued when the next reduce-scatter was, and
    /// begins when its own is complete.
    fn issue_ready(&mut self) -> io::Result<()> {
        while let Some([(scatter, index), (next, _)]) =
            self.block.all_reduces.get(self.all_reduces..self.all_reduces + 2)
        {
            if !self.is_issued(*next) {
                break;
            }
            self.issue(*index, self.after(*scatter))?;
            self.all_reduces += 1;
        }
        Ok(())
    }

    fn is_issued(&self, reference: Reference) -> bool {
        !matches!(reference, Reference::Here(_)) || self.walk.issued.find(reference).is_some()
    }

    /// Returns the nodes that a follower of an operation follows. There is no microbatch before the
    /// first.
    fn after(&self, reference: Reference) -> After {
        self.walk.issued.find(reference).copied().unwrap_or_default()
    }

    fn need(&mut self, reference: Reference) {
        let after = self.after(reference);
        let is_exchange = match reference {
            Reference::Here(index) => self.prepared.operations[index].is_exchange,
            Reference::Earlier(_) | Reference::Slices(_) => false,
        };
        let walk = &mut *self.walk;
        walk.computation = walk.computation.and(after);
        if walk.is_on_host() || is_exchange {
            walk.host = walk.host.and(after);
        }
    }

    /// Computes. The device begins when the thread launches. All that follows it follows the
    /// thread, too, so nothing follows it before the launch ends.
    fn compute(&mut self, place: usize) -> io::Result<()> {
        let Some(work) = &mut self.prepared.works[place] else { return Ok(()) };
        let launched = self.walk.host;
        let walk = &mut *self.walk;
        if work.device.is_none() || work.host.time > Time::ZERO {
            walk.host = self.nodes.add(&mut work.host, walk.host)?;
        }
        walk.computation = match &mut work.device {
            None => walk.host,
            Some(device) => self.nodes.add(device, walk.computation.and(launched))?,
        };
        Ok(())
    }
}
