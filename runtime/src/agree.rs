//! The records that ranks exchange, and the conclusions that they draw from them.

pub(crate) mod agreement;
pub(crate) mod comparison;
pub(crate) mod header;
pub(crate) mod interim;
pub(crate) mod microbatch_header;
pub(crate) mod non_finite;
pub(crate) mod presence;
pub(crate) mod samples;
pub(crate) mod unit_use;
pub(crate) mod updated;
