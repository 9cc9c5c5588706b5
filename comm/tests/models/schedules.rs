//! Which schedules a model is run under, and how one of them is run again.

use std::env;
use std::path::PathBuf;

use shuttle::scheduler::{DfsScheduler, PctScheduler, RandomScheduler, ReplayScheduler, Scheduler};
use shuttle::{Config, FailurePersistence, Runner, check_uncontrolled_nondeterminism};

/// How many schedules of each kind, unless `HSDP_MODEL_SCHEDULES` says otherwise.
const SCHEDULES: usize = 4_000;

/// How many turns the threads take at moments that a schedule of the second kind has chosen beforehand.
const DEPTH: usize = 3;

/// The schedules of a model are the same in each run, unless `SHUTTLE_RANDOM_SEED` says otherwise.
const SEED: u64 = 20_240_229;

/// Runs `model` under schedules that are random at each point, and under schedules in which threads have random priorities
/// that change at few random moments (PCT: Burckhardt et al., "A Randomized Scheduler with Probabilistic Guarantees of
/// Finding Bugs", 2010).
///
/// With `HSDP_MODEL_REPLAY` it runs the schedule in that file instead.
pub(crate) fn schedules(model: impl Fn() + Copy + Send + Sync + 'static) {
    if let Some(file) = env::var_os("HSDP_MODEL_REPLAY") {
        let mut schedule = ReplayScheduler::new_from_file(file).expect("a schedule");
        // It ends with the panic, which unwinds once more now.
        schedule.set_allow_incomplete();
        return under(schedule, model);
    }
    let count =
        env::var("HSDP_MODEL_SCHEDULES").map_or(SCHEDULES, |it| it.parse().expect("a number"));
    under(RandomScheduler::new_from_seed(SEED, count), model);
    under(PctScheduler::new_from_seed(SEED, DEPTH, count), model);
    // A schedule means something only if nothing but the schedule decides.
    check_uncontrolled_nondeterminism(model, count.div_ceil(100));
}

/// Runs `model` under `schedules`, and under `count` schedules that differ in their last turns: all that there are, if
/// there are no more.
pub(crate) fn all_schedules(count: usize, model: impl Fn() + Copy + Send + Sync + 'static) {
    schedules(model);
    if env::var_os("HSDP_MODEL_REPLAY").is_none() {
        under(DfsScheduler::new(Some(count), false), model);
    }
}

fn under(schedules: impl Scheduler + 'static, model: impl Fn() + Send + Sync + 'static) {
    let mut config = Config::new();
    config.stack_size = 256 << 10;
    config.silence_warnings = true;
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    config.failure_persistence = FailurePersistence::File(Some(folder));
    Runner::new(schedules, config).run(model);
}
