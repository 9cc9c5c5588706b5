//! Row 50: a collective that is called from code that lends a gradient to another one.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use hsdp::{
    GradientValues, LossSum, ModelOptions, ShardedModel, StepOptions, UnitGradients, Values,
};
use hsdp_comm::CallError::Reentrant;
use hsdp_comm::{Channel, Error, Group, Op, Tag};
use hsdp_tests::support::models::{one_parameter, unit};
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common, mesh, on_ranks};

use crate::runner::Happened;
use crate::training::RANKS;

const ELEMENTS: usize = 200;

/// A gradient of ones that has a barrier whenever it is read.
struct Calling {
    group: Group,
    told: Arc<Mutex<Vec<Error>>>,
}

impl fmt::Debug for Calling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Calling")
    }
}

impl GradientValues for Calling {
    fn len(&self) -> usize {
        ELEMENTS
    }

    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        let refused = self.group.barrier(Tag::default()).map(drop).expect_err("refused");
        self.told.lock().unwrap_or_else(PoisonError::into_inner).push(refused);
        visit(Values::F32(&vec![1.0; range.len()]));
    }
}

pub(crate) fn reentrant() -> Happened {
    let started = Instant::now();
    let (told, gradients): (Vec<_>, Vec<_>) = on_ranks(RANKS, |world| {
        let group = world.world_group(Channel::User);
        let told = Arc::default();
        let calling = Calling { group, told: Arc::clone(&told) };
        let options = ModelOptions::on(mesh(2, 2));
        let mut model =
            ShardedModel::new(world, one_parameter(ELEMENTS), options, springs::initial)?;
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        let mut pass = step.microbatch()?;
        let _ = pass.loss(LossSum::new(0.0, 1))?;
        pass.reduce(unit(0), UnitGradients::of([calling]))?;
        pass.finish()?;
        let gradient = step.finish()?.full(&model)?;
        Ok((told, gradient))
    })
    .into_iter()
    .unzip();
    assert_eq!(common(gradients)["w"], [1.0; ELEMENTS], "the outer one completes");
    let mut last = None;
    for (rank, told) in told.iter().enumerate() {
        let told = told.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(!told.is_empty(), "the gradient of rank {rank} was read");
        for error in told.iter() {
            let Error::Call(Reentrant { op: Op::Barrier, rank: of }) = error else {
                panic!("{error}")
            };
            assert_eq!(of.index(), rank);
            last = Some(error.clone());
        }
    }
    Happened::in_time(&last.expect("there are ranks"), started.elapsed())
}
