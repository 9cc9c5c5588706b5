//! Full parameters, as ranks gather and read them: their values, one copy for all ranks of a
//! process, and those that are stored in the compute dtype alone.

mod one_copy;
mod several_dtypes;
mod stored;
mod values;
