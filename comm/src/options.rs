//! How a world of threads runs.

use std::time::Duration;

/// Options of a local world.
///
/// ```
/// use std::time::Duration;
/// use hsdp_comm::WorldOptions;
///
/// let options = WorldOptions { deadline: Duration::from_secs(5), ..WorldOptions::default() };
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorldOptions {
    /// How long a rank waits for one operation before it ends the world, from the moment when it begins to wait, not
    /// from when it issued. Of any length; default 120 s.
    pub deadline: Duration,
    /// How long a rank waits for one operation before it warns, naming who is missing. Default 5 s; a warning that
    /// would not come before the deadline is not given.
    pub late: Duration,
    /// Threads that do the work of operations beside the ranks.
    pub workers: Workers,
}

impl Default for WorldOptions {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(120),
            late: Duration::from_secs(5),
            workers: Workers::Auto,
        }
    }
}

/// How many threads do the work of operations beside the ranks. Results do not depend on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Workers {
    /// One a core, but no more than there are ranks.
    #[default]
    Auto,
    /// So many. With 0 the member that arrives last does all the work before its call returns.
    Count(usize),
}
