//! Steps that end early: a rank gives one up, all ranks refuse one alike, or the world ends.

mod all_ranks;
mod another_thread;
mod between_steps;
mod every_call;
mod failed_calls;
mod misused;
mod reasons;
mod without_a_trace;

use hsdp::{AdamW, Error, Optimizer, ShardedModel, StepOptions};
use hsdp_tests::support::handmade::Until;
use hsdp_tests::support::springs::{self, Batch};

const STEPS: u64 = 4;

const MICROBATCHES: usize = 2;

/// Where in its first attempt at step 1 a rank gives up: in this microbatch, that far.
#[derive(Clone, Copy, Debug)]
struct Accident {
    microbatch: usize,
    until: Until,
}

/// One attempt at the next step, which ends early where this rank has an accident.
fn attempt(
    model: &mut ShardedModel,
    adamw: &mut AdamW,
    accident: Option<Accident>,
) -> Result<(), Error> {
    let rank = model.rank().index();
    let number = model.committed_steps();
    let mut step = model.begin_step(StepOptions::microbatches(MICROBATCHES))?;
    for microbatch in 0..MICROBATCHES {
        let here = accident.filter(|accident| accident.microbatch == microbatch);
        let until = here.map_or(Until::End, |accident| accident.until);
        springs::microbatch_until(&mut step, Batch::of(rank, number, microbatch), until)?;
        if here.is_some() {
            return Ok(());
        }
    }
    let gradients = step.finish()?;
    adamw.step(model, gradients.clip(1.0)).map(drop)
}
