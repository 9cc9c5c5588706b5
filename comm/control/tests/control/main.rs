//! The control plane from its users' side: members are threads, the network is loopback.

mod cuts;
mod ends;
mod rendezvous;
mod rounds;
mod silence;
mod world;
