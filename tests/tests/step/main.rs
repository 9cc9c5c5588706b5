//! A step: its order, its calls and bytes, its divide factors, and how it ends or is refused.

mod buffers;
mod counts;
mod divide_factors;
mod evaluation;
mod first_step;
mod fsdp2_facts;
mod messages;
mod non_finite;
mod operations;
mod order;
mod refusals;
mod statistics;
mod step_ends;
mod step_machine;
mod uneven_inputs;
mod unit_order;
mod unused_and_frozen;
