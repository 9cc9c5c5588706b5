//! The control plane, as those see it who use it: members are threads, the network is loopback.

mod cuts;
mod ends;
mod rendezvous;
mod rounds;
mod silence;
mod world;
