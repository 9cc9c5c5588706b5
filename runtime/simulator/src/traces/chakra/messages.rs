//! The messages of Chakra's `schema/protobuf/et_def.proto`, 0.0.4, with the fields that are written.

/// The first message of a file.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct GlobalMetadata {
    #[prost(string, tag = "1")]
    pub(super) version: String,
}

/// A node.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Node {
    #[prost(uint64, tag = "1")]
    pub(super) id: u64,
    #[prost(string, tag = "2")]
    pub(super) name: String,
    #[prost(enumeration = "NodeType", tag = "3")]
    pub(super) kind: i32,
    #[prost(uint64, repeated, tag = "5")]
    pub(super) data_deps: Vec<u64>,
    #[prost(uint64, tag = "7")]
    pub(super) duration_micros: u64,
    #[prost(message, repeated, tag = "10")]
    pub(super) attributes: Vec<Attribute>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub(super) enum NodeType {
    Invalid = 0,
    Computation = 4,
    Collective = 7,
}

/// The kind of a collective, as the attribute `comm_type` has it.
#[derive(Clone, Copy, Debug)]
#[repr(i64)]
pub(super) enum CollectiveType {
    AllReduce = 0,
    AllGather = 2,
    ReduceScatter = 7,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Attribute {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(oneof = "Value", tags = "9, 27, 29")]
    value: Option<Value>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum Value {
    #[prost(int64, tag = "9")]
    Integer(i64),
    #[prost(bool, tag = "27")]
    Bool(bool),
    #[prost(string, tag = "29")]
    Text(String),
}

impl Attribute {
    pub(super) fn new(name: &str, value: Value) -> Self {
        Self { name: name.to_owned(), value: Some(value) }
    }
}
