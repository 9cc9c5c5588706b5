//! Rows 57 and 60: bits that differ and should not, and what must not change a bit.

use std::num::NonZeroU64;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use hsdp::{Error, ModelOptions, Rank, World, WorldOptions};
use hsdp_comm::{Fault, FaultKind, Stage};
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common_error, mesh, outcomes};

use crate::runner::Happened;
use crate::training::{ALL, CULPRIT, FAULTY, RANKS, Recording, Training};

/// A bit flips on one rank in the faulty step's update; replicas compare before every second step.
pub(crate) fn flipped() -> Happened {
    let flipped_at = Mutex::new(None);
    let flips = || *flipped_at.lock().expect("not poisoned") = Some(Instant::now());
    let told = outcomes(RANKS, |world| train_and_flip(world, &flips));
    let took = flipped_at.into_inner().expect("not poisoned").map(|at: Instant| at.elapsed());
    let error = common_error(told);
    let Error::Disagreement { what, rank, other, .. } = &error else { panic!("{error}") };
    assert_eq!((&**what, rank.index(), other.index()), ("the content of a shard", CULPRIT, 0));
    assert!(error.is_fatal());
    Happened::in_time(&error, took.expect("it flips"))
}

fn train_and_flip(world: World, flips: &dyn Fn()) -> Result<(), Error> {
    let compare_replicas = NonZeroU64::new(2);
    let options = ModelOptions { compare_replicas, ..ModelOptions::on(mesh(2, 2)) };
    let rank = world.rank().index();
    let mut model = springs::model(world, &options)?;
    for number in 0..=FAULTY + 2 {
        let gradients = springs::gradients(&mut model, 1)?;
        let mut flip = (rank, number) == (CULPRIT, FAULTY);
        model.update(gradients, |run| {
            for (parameter, gradient) in run.parameters.iter_mut().zip(run.gradient.iter()) {
                *parameter -= 1e-3 * gradient;
            }
            if std::mem::take(&mut flip) {
                flips();
                run.parameters[0] = f32::from_bits(run.parameters[0].to_bits() ^ 1);
            }
        })?;
    }
    Ok(())
}

/// Warnings, comparisons and recordings, and faults of every kind that are armed for a step that
/// never comes.
pub(crate) fn everything_on() -> Happened {
    let valued = [FaultKind::Delay(Duration::from_secs(1)), FaultKind::NonFinite(f32::NAN)];
    let kinds: Vec<FaultKind> =
        FaultKind::PLAIN.into_iter().map(|(kind, _)| kind).chain(valued).collect();
    let armed =
        |rank| kinds.iter().map(move |kind| Fault::at(Rank::new(rank), 1000, Stage::Reduce, *kind));
    let quiet = Training::new();
    let late = Duration::ZERO;
    let circle_grace = Duration::ZERO;
    let faults = ALL.into_iter().flat_map(armed).collect();
    let training = Training {
        world: WorldOptions { late, circle_grace, faults, ..quiet.world.clone() },
        model: ModelOptions { compare_replicas: NonZeroU64::new(1), ..quiet.model.clone() },
        recording: Recording::On,
        ..quiet
    };
    let started = Instant::now();
    let run = training.run();
    let took = started.elapsed();
    run.assert_no_trace();
    let events = run.fared(0).events;
    assert!(
        ALL.iter().all(|rank| run.fared(*rank).events == events) && events > 0,
        "{events} events"
    );
    Happened::after(&format!("nothing; {events} events a rank, and the same bits"), took)
}
