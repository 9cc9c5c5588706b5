//! Full parameters, as ranks gather and read them: their values, and one copy for all ranks of a process.

mod one_copy;
mod values;
