//! The control plane from its users' side: members are threads, the network is loopback.

mod address;
mod changes;
mod cuts;
mod ends;
mod exchange;
mod messages;
mod rendezvous;
mod send_sync;
mod silence;
mod way;
mod world;
