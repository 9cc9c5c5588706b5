//! Calls and options that are refused, with names and numbers.
//!
//! `misuse`: a rank misuses the API. `disagreement`: ranks were given different things. `replicas`:
//! replicas of a shard have come to differ. `updates`: ranks update a step in different ways.
//! `values`: values that would destroy the parameters, or have no room.

mod disagreement;
mod faults;
mod misuse;
mod objects;
mod replicas;
mod updates;
mod values;
