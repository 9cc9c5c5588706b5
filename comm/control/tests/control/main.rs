//! The control plane from its users' side: members are threads, the network is loopback.

mod changes;
mod cuts;
mod ends;
mod rendezvous;
mod rounds;
mod silence;
mod way;
mod world;
