//! How operations are carried. Today ranks that share no memory are a part of the backend of threads.

pub(crate) mod thread;
