//! Reads Chakra's files, written from the published schema alone: protocol buffers' encoding, and the numbers of the fields.

use std::collections::BTreeMap;

/// A node of a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Node {
    pub(crate) id: u64,
    pub(crate) name: String,
    pub(crate) kind: u64,
    pub(crate) deps: Vec<u64>,
    pub(crate) duration_micros: u64,
    attributes: BTreeMap<String, Attribute>,
}

/// `enum NodeType`.
pub(crate) const COMP_NODE: u64 = 4;
pub(crate) const COMM_COLL_NODE: u64 = 7;

/// `oneof value` of `AttributeProto`, as far as files have it.
#[derive(Clone, Debug, PartialEq)]
enum Attribute {
    Int64(u64),
    Bool(bool),
    Text(String),
}

impl Node {
    pub(crate) fn is_cpu_op(&self) -> bool {
        match self.attributes.get("is_cpu_op") {
            Some(Attribute::Bool(is_cpu_op)) => *is_cpu_op,
            other => panic!("is_cpu_op of {}: {other:?}", self.name),
        }
    }

    pub(crate) fn integer(&self, name: &str) -> u64 {
        match self.attributes.get(name) {
            Some(Attribute::Int64(value)) => *value,
            other => panic!("{name} of {}: {other:?}", self.name),
        }
    }

    pub(crate) fn group(&self) -> u64 {
        match self.attributes.get("pg_name") {
            Some(Attribute::Text(value)) => value.parse().expect("a number"),
            other => panic!("pg_name of {}: {other:?}", self.name),
        }
    }

    pub(crate) fn names(&self) -> Vec<&str> {
        self.attributes.keys().map(String::as_str).collect()
    }
}

/// The version of a file, and its nodes.
pub(crate) fn read(mut bytes: &[u8]) -> (String, Vec<Node>) {
    let mut messages = Vec::new();
    while !bytes.is_empty() {
        let length = usize::try_from(varint(&mut bytes)).expect("a length");
        messages.push(split(&mut bytes, length));
    }
    let mut messages = messages.into_iter();
    let metadata = messages.next().expect("metadata come first");
    let version = match fields(metadata).as_slice() {
        [(1, Field::Bytes(version))] => text(version),
        other => panic!("metadata: {other:?}"),
    };
    (version, messages.map(node).collect())
}

fn node(message: &[u8]) -> Node {
    let mut node = Node::default();
    for field in fields(message) {
        match field {
            (1, Field::Varint(id)) => node.id = id,
            (2, Field::Bytes(name)) => node.name = text(name),
            (3, Field::Varint(kind)) => node.kind = kind,
            (5, Field::Bytes(mut packed)) => {
                while !packed.is_empty() {
                    node.deps.push(varint(&mut packed));
                }
            }
            (7, Field::Varint(duration)) => node.duration_micros = duration,
            (10, Field::Bytes(message)) => {
                let (name, value) = attribute(message);
                let before = node.attributes.insert(name, value);
                assert_eq!(before, None, "an attribute comes twice");
            }
            other => panic!("node: {other:?}"),
        }
    }
    node
}

fn attribute(message: &[u8]) -> (String, Attribute) {
    match fields(message).as_slice() {
        [(1, Field::Bytes(name)), (number, value)] => {
            let value = match (number, value) {
                (9, Field::Varint(value)) => Attribute::Int64(*value),
                (27, Field::Varint(value)) => Attribute::Bool(*value == 1),
                (29, Field::Bytes(value)) => Attribute::Text(text(value)),
                other => panic!("value: {other:?}"),
            };
            (text(name), value)
        }
        other => panic!("attribute: {other:?}"),
    }
}

/// A field by its wire type, of those that the schema's messages need here.
#[derive(Debug)]
enum Field<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
}

fn fields(mut message: &[u8]) -> Vec<(u64, Field<'_>)> {
    let mut fields = Vec::new();
    while !message.is_empty() {
        let key = varint(&mut message);
        let field = match key & 7 {
            0 => Field::Varint(varint(&mut message)),
            2 => {
                let length = usize::try_from(varint(&mut message)).expect("a length");
                Field::Bytes(split(&mut message, length))
            }
            wire_type => panic!("wire type {wire_type}"),
        };
        fields.push((key >> 3, field));
    }
    fields
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = split(bytes, 1)[0];
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return value;
        }
    }
    panic!("a varint has at most ten bytes");
}

fn split<'a>(bytes: &mut &'a [u8], length: usize) -> &'a [u8] {
    assert!(length <= bytes.len(), "{length} bytes of {}", bytes.len());
    let (first, rest) = bytes.split_at(length);
    *bytes = rest;
    first
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}
