//! Parts of all backends that know none of them: the clocks of waits, and the early ends.

mod clock;
mod status;

pub(crate) use self::clock::{Alarm, Clock, FAR, from_now};
pub(crate) use self::status::Status;
