//! Gathers of parts: their buffers come back, whatever becomes of the operation.

use std::sync::Arc;

use hsdp_comm::{Error, Group, StepFailure, Tag, Ungathered, World, WorldOptions};
use hsdp_kernels::HostBuffer;
use shuttle::thread;

use super::{LARGE, SMALL, all_schedules, options, run, schedules, user};

/// Gathers the parts of two members, of `len` elements each, which are their slots plus 1.
fn gathered(
    group: &Group,
    len: usize,
    buffer: Vec<f32>,
) -> Result<Vec<f32>, Ungathered<HostBuffer>> {
    let cuts: Arc<[usize]> = [0, len, 2 * len].into();
    let pending = group.gather_parts(Tag::default(), cuts, buffer.into());
    pending.and_then(|pending| pending.wait()).map(values)
}

fn values(buffer: HostBuffer) -> Vec<f32> {
    let HostBuffer::F32(values) = buffer else { panic!("another dtype") };
    values
}

fn own(group: &Group, len: usize) -> Vec<f32> {
    let mut values = vec![0.0; 2 * len];
    let slot = group.index();
    values[slot * len..(slot + 1) * len].fill(1.0 + slot as f32);
    values
}

fn all(len: usize) -> Vec<f32> {
    [vec![1.0; len], vec![2.0; len]].concat()
}

/// Checks that the part of a member is as it was.
fn assert_is_own(group: &Group, len: usize, buffer: &[f32]) {
    let part = group.index() * len..(group.index() + 1) * len;
    assert_eq!(buffer[part.clone()], own(group, len)[part]);
}

/// Rank 0 gives its step up when it has issued a gather. All gather again.
fn give_up(len: usize, workers: usize) {
    run(&World::local(2, options(workers)), move |world| {
        let group = user(&world);
        let pending = {
            let cuts: Arc<[usize]> = [0, len, 2 * len].into();
            group.gather_parts(Tag::default(), cuts, own(&group, len).into())
        };
        if group.index() == 0 {
            let reason = "the data loader broke".to_owned();
            world.abort_step(StepFailure { step: 7, reason });
        }
        let buffer = match pending.and_then(|pending| pending.wait()) {
            Ok(buffer) => {
                let buffer = values(buffer);
                assert_eq!(buffer, all(len));
                // It hears of the end at its next call.
                let failed = gathered(&group, len, buffer).expect_err("the step is over");
                values(failed.reclaim().expect("it comes back"))
            }
            Err(failed) => {
                assert!(matches!(failed.error, Error::StepAborted { step: 7, .. }), "{failed:?}");
                values(failed.reclaim().expect("it comes back"))
            }
        };
        assert_is_own(&group, len, &buffer);
        assert_eq!(world.next_epoch(), 1);
        assert_eq!(gathered(&group, len, buffer).expect("all come"), all(len));
    });
}

#[test]
fn a_buffer_comes_back_from_a_step_that_is_given_up() {
    all_schedules(10_000, || give_up(SMALL, 0));
}

#[test]
fn a_buffer_comes_back_from_a_step_that_is_given_up_while_a_worker_runs_blocks() {
    schedules(|| give_up(LARGE, 1));
}

/// The deadline of the world is that of the wait for the buffer, too.
#[test]
fn a_buffer_comes_back_when_a_deadline_passes_while_blocks_are_run() {
    schedules(|| {
        let deadline = std::time::Duration::ZERO;
        let worlds = World::local(2, WorldOptions { deadline, ..options(1) });
        run(&worlds, |world| {
            let group = user(&world);
            let mut outcome = gathered(&group, LARGE, own(&group, LARGE));
            while let Err(failed) = outcome {
                thread::yield_now();
                outcome = failed.reclaim().map(values);
            }
            let buffer = outcome.expect("it has come back");
            assert_is_own(&group, LARGE, &buffer);
        });
    });
}
