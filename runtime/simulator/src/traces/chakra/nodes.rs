//! Nodes as bytes: each message follows its length.

use std::io::{self, Write};

use prost::Message;

use super::after::After;
use super::messages::{GlobalMetadata, Node};
use crate::Time;
use crate::simulation::Lane;

/// The version of the schema.
const VERSION: &str = "0.0.4";

/// Picoseconds of a microsecond, the unit of durations.
const MICROSECOND: u64 = 1_000_000;

/// The nodes of a file that is written.
pub(super) struct Nodes<'a, W> {
    sink: &'a mut W,
    /// The identifier of the last one; they begin at 1.
    last: u64,
    /// By lane: the time of its nodes. Their sum is rounded, not each duration, so errors do not add up.
    times: [Time; After::LANES],
    buffer: Vec<u8>,
}

/// A node that repeats: all of it but its identifier, its duration and the nodes that it follows.
#[derive(Debug)]
pub(super) struct Template {
    pub(super) node: Node,
    pub(super) lane: Lane,
    pub(super) time: Time,
}

impl<'a, W: Write> Nodes<'a, W> {
    /// Begins a file.
    pub(super) fn begin(sink: &'a mut W) -> io::Result<Self> {
        let mut nodes =
            Self { sink, last: 0, times: [Time::ZERO; After::LANES], buffer: Vec::new() };
        nodes.write(&GlobalMetadata { version: VERSION.to_owned() })?;
        Ok(nodes)
    }

    /// Adds a node behind others.
    pub(super) fn add(&mut self, template: &mut Template, after: After) -> io::Result<After> {
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
