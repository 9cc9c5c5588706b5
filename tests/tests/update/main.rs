//! Updates of parameters, and the parameters afterwards, beside training without shards.

mod full_parameters;
mod norms;
mod parity;
mod updates;
