//! The nodes of a block, which repeat with each microbatch.

use std::io;

use hsdp_flight::{Channel, Op};
use hsdp_sharding::{Axis, Rank};

use super::super::{Traces, names};
use super::messages::{Attribute, CollectiveType, Node, NodeType, Value};
use super::nodes::Template;
use crate::Time;
use crate::host::{Action, Block, Members, Operation, Placement, Work};
use crate::simulation::{Lane, stream};

/// The nodes of a block.
pub(super) struct Prepared {
    /// By operation.
    pub(super) operations: Vec<PreparedOperation>,
    /// By action: that of computation.
    pub(super) works: Vec<Option<PreparedWork>>,
}

pub(super) struct PreparedOperation {
    pub(super) lane: Lane,
    pub(super) is_exchange: bool,
    /// The part of the host.
    pub(super) call: Template,
    /// The operation; none if it moves nothing.
    pub(super) collective: Option<Template>,
}

pub(super) struct PreparedWork {
    /// The part of the host.
    pub(super) host: Template,
    /// The part of the device; none where the host computes.
    pub(super) device: Option<Template>,
}

impl Traces<'_> {
    /// The nodes of a rank's block.
    pub(super) fn prepare(&self, rank: Rank, block: &Block) -> io::Result<Prepared> {
        let operations = block.operations.iter().map(|it| self.operation(rank, it));
        let work = |action: &Action| match action {
            Action::Compute(work) => Some(self.work(*work)),
            _ => None,
        };
        let works = block.actions.iter().map(work).collect();
        Ok(Prepared { operations: operations.collect::<io::Result<_>>()?, works })
    }

    fn operation(&self, rank: Rank, operation: &Operation) -> io::Result<PreparedOperation> {
        let (members, mesh) = (operation.members, self.orders.mesh);
        let first = match members {
            Members::Shard => mesh.members(Axis::Shard, rank).next(),
            Members::Replicate => mesh.members(Axis::Replicate, rank).next(),
            Members::World => None,
        };
        let shape = self.costs.shape(members, first.unwrap_or(Rank::new(0)));
        let cost = self.costs.operation(operation, shape);
        let name = names::of_operation(self.spec, operation);
        let call = computation(format!("issue {name}"), Lane::Host, cost.host);
        let lane = lane(operation.channel, self.orders.placement);
        let moves = members.count(mesh) > 1 && operation.bytes() > 0;
        let group = self.group(operation.channel, members, rank);
        let attributes = attributes(operation, group)?;
        let node = Node { name, kind: NodeType::Collective.into(), attributes, ..Node::default() };
        let collective = moves.then_some(Template { node, lane, time: cost.link });
        let is_exchange = operation.channel == Channel::Control;
        Ok(PreparedOperation { lane, is_exchange, call, collective })
    }

    fn work(&self, work: Work) -> PreparedWork {
        let (name, cost) = (names::of_work(self.spec, work), self.costs.work(work));
        match self.orders.placement {
            Placement::Host => {
                PreparedWork { host: computation(name, Lane::Host, cost.host), device: None }
            }
            Placement::Device => {
                let host = computation(format!("launch {name}"), Lane::Host, cost.host);
                let device = computation(name, Lane::Computation, cost.device);
                PreparedWork { host, device: Some(device) }
            }
        }
    }
}

/// The stream of an operation. On a device, exchanges are in the stream of all others: ASTRA-sim has one communication of a rank at a time, so
/// without this order two ranks could begin different ones, and wait for each other.
fn lane(channel: Channel, placement: Placement) -> Lane {
    let channel = if placement == Placement::Device { Channel::Gather } else { channel };
    Lane::Collectives(stream(channel, placement))
}

fn computation(name: String, lane: Lane, time: Time) -> Template {
    let is_on_host = Attribute::new("is_cpu_op", Value::Bool(lane == Lane::Host));
    let (kind, attributes) = (NodeType::Computation.into(), vec![is_on_host]);
    Template { node: Node { name, kind, attributes, ..Node::default() }, lane, time }
}

/// `comm_size` is the number of bytes that each member puts in, as ASTRA-sim takes it: the shard of an all-gather, and the whole
/// input of a reduce-scatter.
fn attributes(operation: &Operation, group: usize) -> io::Result<Vec<Attribute>> {
    let kind = match operation.op {
        Op::AllGather => CollectiveType::AllGather,
        Op::ReduceScatter => CollectiveType::ReduceScatter,
        Op::AllReduce => CollectiveType::AllReduce,
        op => {
            let refusal = format!("{op} is no operation of a step");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, refusal));
        }
    };
    let bytes = i64::try_from(operation.bytes()).unwrap_or(i64::MAX);
    Ok(vec![
        Attribute::new("is_cpu_op", Value::Bool(false)),
        Attribute::new("comm_type", Value::Integer(kind as i64)),
        Attribute::new("comm_size", Value::Integer(bytes)),
        Attribute::new("pg_name", Value::Text(group.to_string())),
    ])
}
