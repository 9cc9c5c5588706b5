//! Memory, measured by the allocator, against the plan's formulas.

mod stored;

use std::fmt::Write as _;
use std::hint::black_box;
use std::path::Path;

use hsdp::checkpoint::{CheckpointOptions, Checkpointed, Checkpoints, Import};
use hsdp::memory::{self, Category, Usage};
use hsdp::{
    Accumulation, AdamW, AdamWOptions, DType, Ema, Error, FullCopies, LossSum, Mesh, ModelOptions,
    ModelSpec, Optimizer, Param, Precision, Rank, ShardedModel, StateOver, StepOptions, Unit,
    UnitOrder, Unused,
};
use hsdp_comm::{Channel, Tag};
use hsdp_sharding::{ByteCount, MemoryPlan};
use hsdp_tests::support::models::{computing_in, layer, partly_frozen, three_units, unit};
use hsdp_tests::support::springs::Batch;
use hsdp_tests::support::worlds::{mesh, meshes, on_ranks};
use hsdp_tests::support::{slopes, springs};
use safetensors::tensor::TensorView;

use crate::alone;

#[test]
fn the_allocator_counts() {
    let _turn = alone();
    let _shard = memory::scope(Category::Shard);
    let shard = black_box(vec![0.0_f32; 1000]);
    assert_eq!(memory::usage(Rank::new(0), Category::Shard).live, ByteCount(4000));
    drop(shard);
}

#[test]
fn peaks_are_as_planned_whatever_is_prefetched_or_kept() {
    let mut compared = Compared::default();
    for (name, spec) in [("resharded", uneven_units()), ("kept", with_kept_units())] {
        for prefetch in 0..=3 {
            let options = ModelOptions { prefetch, ..ModelOptions::on(mesh(2, 2)) };
            compared.add(&format!("{name}, {prefetch} ahead"), &spec, &options);
        }
    }
    println!("{}", compared.table());
}

#[test]
fn peaks_are_as_planned_in_every_mode_on_every_mesh() {
    let mut compared = Compared::default();
    for accumulation in Accumulation::ALL {
        for (replicate, shard) in [(1, 1), (1, 4), (4, 1), (2, 2), (2, 3), (3, 2)] {
            for state in StateOver::ALL {
                let on = ModelOptions::on(mesh(replicate, shard));
                let options = ModelOptions { accumulation, state, ..on };
                let name = format!("{accumulation}, {}, state over {state}", options.mesh);
                compared.add(&name, &uneven_units(), &options);
            }
        }
    }
    println!("{}", compared.table());
}

#[test]
fn peaks_are_as_planned_in_every_dtype() {
    let mut compared = Compared::default();
    for (parameters, wire) in
        [(DType::F32, DType::BF16), (DType::BF16, DType::F32), (DType::F16, DType::F16)]
    {
        for accumulation in Accumulation::ALL {
            for state in StateOver::ALL {
                let precision = Precision { parameters, wire, ..Precision::default() };
                let on = ModelOptions::on(mesh(2, 2));
                let options = ModelOptions { accumulation, state, precision, ..on };
                let name = format!(
                    "{accumulation}, parameters {parameters}, wire {wire}, state over {state}"
                );
                compared.add(&name, &uneven_units(), &options);
            }
        }
    }
    println!("{}", compared.table());
}

#[test]
fn peaks_are_as_planned_for_units_in_several_dtypes() {
    let mut compared = Compared::default();
    let mixtures: [(DType, &[Option<DType>]); 3] = [
        (DType::BF16, &[None, Some(DType::F32)]),
        (DType::F32, &[Some(DType::BF16), None, Some(DType::F16)]),
        (DType::F16, &[None, None, None, Some(DType::F32), None]),
    ];
    for (parameters, dtypes) in mixtures {
        let precision = Precision::compute_in(parameters);
        for (spec, accumulation) in [
            (uneven_units(), Accumulation::ReduceScatter),
            (with_kept_units(), Accumulation::Every),
            (partly_frozen(), Accumulation::Local),
        ] {
            for (replicate, shard) in [(1, 1), (1, 2), (2, 2)] {
                for prefetch in 0..=2 {
                    let on = ModelOptions::on(mesh(replicate, shard));
                    let options = ModelOptions { accumulation, precision, prefetch, ..on };
                    let name = format!(
                        "{accumulation}, {}, {prefetch} ahead, {parameters} and {dtypes:?}",
                        options.mesh
                    );
                    compared.add(&name, &computing_in(&spec, dtypes), &options);
                }
            }
        }
    }
    println!("{}", compared.table());
}

#[test]
fn peaks_are_as_planned_with_frozen_parameters() {
    let mut compared = Compared::default();
    for accumulation in Accumulation::ALL {
        for state in StateOver::ALL {
            for dtype in [DType::F32, DType::BF16] {
                let precision = Precision::compute_in(dtype);
                let on = ModelOptions::on(mesh(2, 2));
                let options = ModelOptions { accumulation, state, precision, ..on };
                let name = format!("{accumulation}, frozen, {dtype}, state over {state}");
                compared.add(&name, &partly_frozen(), &options);
            }
        }
    }
    println!("{}", compared.table());
}

/// A unit that a rank does not use in a forward stays until its loss, and no longer: the backward
/// has its room.
#[test]
fn a_unit_that_is_skipped_makes_room_when_the_backward_begins() {
    let _turn = alone();
    on_ranks(2, |world| {
        let order = UnitOrder::Error;
        let unused = Unused::Zeros;
        let options = ModelOptions { prefetch: 0, order, unused, ..ModelOptions::on(mesh(1, 2)) };
        let mut model = springs::model_of(world, &uneven_units(), &options)?;
        let rank = model.rank();
        let planned = model.plan().memory().full;
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        let mut pass = step.microbatch()?;
        for index in [1, 2, 4] {
            let _ = pass.unshard(unit(index))?;
        }
        let held = memory::usage(rank, Category::Full).live;
        assert!(held > planned, "units 0 and 3 wait to be asked for: {held}");
        let _ = pass.loss(LossSum::new(0.0, 1))?;
        for index in (0..5).rev() {
            let _full = pass.unshard(unit(index))?;
            let held = memory::usage(rank, Category::Full).live;
            assert!(held <= planned, "{held} with unit {index}, planned {planned}");
        }
        pass.finish()?;
        step.finish().map(drop)
    });
}

/// The head is declared before the layers, and used after them: in the declared order the backward
/// would gather the whole model.
#[test]
fn a_forward_in_another_order_needs_the_memory_of_its_own_order() {
    let _turn = alone();
    let layers = (0..4).map(|at| layer(&format!("layer.{at}"), [64, 64]));
    let first = ModelSpec::new().unit(layer("embed", [128, 64])).unit(layer("head", [192, 64]));
    let spec = layers.fold(first, ModelSpec::unit);
    for prefetch in 0..=2 {
        let peaks = on_ranks(2, |world| {
            let unused = Unused::Zeros;
            let options = ModelOptions { prefetch, unused, ..ModelOptions::on(mesh(1, 2)) };
            let mut model = springs::model_of(world, &spec, &options)?;
            let first = held_in_order(&mut model, &[0, 2, 3, 4, 5, 1])?;
            let second = held_in_order(&mut model, &[0, 2, 3, 4, 5, 1])?;
            Ok((first, second, model.plan().memory().full))
        });
        for (first, second, planned) in peaks {
            assert!(
                first <= planned,
                "{prefetch} ahead, {first} while the order is found, planned {planned}"
            );
            assert_eq!(second, planned, "{prefetch} ahead");
        }
    }
}

/// The most bytes of gathered parameters in a step that uses the units in this order.
fn held_in_order(model: &mut ShardedModel, used: &[usize]) -> Result<ByteCount, Error> {
    let rank = model.rank();
    let mut held = ByteCount::ZERO;
    let mut note = || held = held.max(memory::usage(rank, Category::Full).live);
    let mut step = model.begin_step(StepOptions::microbatches(1))?;
    let mut pass = step.microbatch()?;
    for index in used {
        let _full = pass.unshard(unit(*index))?;
        note();
    }
    let _ = pass.loss(LossSum::new(0.0, 1))?;
    for index in used.iter().rev() {
        let _full = pass.unshard(unit(*index))?;
        note();
    }
    pass.finish()?;
    let gradients = step.finish()?;
    model.update(gradients, |_| {})?;
    Ok(held)
}

/// The load reads whole shards into a copy, which the model takes once all ranks have read theirs.
#[test]
fn peaks_of_a_resumed_run_are_as_planned() {
    for dtype in [DType::F32, DType::BF16] {
        for state in StateOver::ALL {
            let _turn = alone();
            let folder = tempfile::tempdir().expect("a folder");
            let precision = Precision::compute_in(dtype);
            let options = ModelOptions { precision, state, ..ModelOptions::on(mesh(2, 2)) };
            let spec = uneven_units();
            let with = CheckpointOptions::default;
            let run = |steps: usize| {
                memory::reset_peaks();
                on_ranks(4, |world| {
                    let mut model = springs::model_of(world, &spec, &options)?;
                    let mut adamw = AdamW::new(&model, AdamWOptions::default());
                    let mut checkpoints = Checkpoints::open(&model, folder.path(), with())?;
                    let resumed = checkpoints.load_latest(&mut model, &mut adamw)?;
                    (0..steps).try_for_each(|_| train_with(&mut model, &mut adamw, 2))?;
                    checkpoints.save(&model, &adamw, &serde_json::Value::Null)?;
                    let shards = model.plan().layouts().iter().map(|layout| layout.shard_len());
                    let read = ByteCount(4 * shards.sum::<usize>() as u64);
                    Ok((resumed.is_some(), all_peaks(model.rank()), read))
                })
            };
            let load = Category::COUNTED.iter().position(|it| *it == Category::Load);
            let load = load.expect("it is counted");
            let how = format!("{dtype}, state over {state}");
            for (fresh, mut resumed) in run(2).into_iter().zip(run(3)) {
                assert_eq!((fresh.0, resumed.0), (false, true));
                assert_eq!(resumed.1[load], resumed.2, "{how}: the copy has 4 bytes an element");
                resumed.1[load] = ByteCount::ZERO;
                assert_eq!(resumed.1, fresh.1, "{how}");
            }
        }
    }
}

/// A bound there: it is reached where one rank is as far ahead of another as can be.
#[test]
fn one_full_copy_is_held_by_rank_0_and_is_no_larger_than_planned() {
    for (name, spec) in [("resharded", uneven_units()), ("kept", with_kept_units())] {
        for prefetch in 0..=2 {
            let _turn = alone();
            let full_copies = FullCopies::PerProcess;
            let options = ModelOptions { prefetch, full_copies, ..ModelOptions::on(mesh(2, 2)) };
            for (rank, (measured, planned)) in peaks(&spec, &options).into_iter().enumerate() {
                let full = measured[Category::COUNTED
                    .iter()
                    .position(|category| *category == Category::Full)
                    .expect("it is counted")];
                match rank {
                    0 => assert!(
                        ByteCount::ZERO < full && full <= planned.full,
                        "{name}, {prefetch} ahead: {full}, planned {}",
                        planned.full
                    ),
                    _ => assert_eq!(full, ByteCount::ZERO, "{name}, rank {rank}"),
                }
            }
        }
    }
    let _turn = alone();
    assert_nothing_is_left("shared copies");
}

#[test]
fn a_shard_is_a_part_of_the_model_and_no_more() {
    let _turn = alone();
    let whole = ByteCount(4 * three_units().numel().get());
    for shards in [1, 2, 4, 8] {
        let held = on_ranks(shards, |world| {
            let model =
                springs::model_of(world, &three_units(), &ModelOptions::on(mesh(1, shards)))?;
            let padding: u64 =
                model.plan().layouts().iter().map(|layout| layout.padding().get()).sum();
            let held = memory::usage(model.rank(), Category::Shard).live;
            Ok((held, whole + ByteCount(4 * padding)))
        });
        for (held, padded) in held {
            assert_eq!(held * shards as u64, padded);
        }
    }
}

#[test]
fn a_full_unit_that_is_dropped_serves_the_next_gather_of_its_size() {
    let _turn = alone();
    let options = ModelOptions { prefetch: 0, ..ModelOptions::on(mesh(1, 2)) };
    let units = (0..3).map(|index| layer(&format!("layer.{index}"), [40, 50]));
    let spec = units.fold(ModelSpec::new(), ModelSpec::unit);
    on_ranks(2, |world| {
        let mut model = springs::model_of(world, &spec, &options)?;
        let rank = model.rank();
        let live = move || memory::usage(rank, Category::Full).live;
        let of_a_unit = ByteCount(4 * spec[unit(0)].numel().get());
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        let mut pass = step.microbatch()?;
        assert_eq!(live(), ByteCount::ZERO);
        let first = pass.unshard(unit(0))?;
        let place = first.as_f32(0).map(<[f32]>::as_ptr);
        drop(first);
        assert_eq!(live(), of_a_unit, "it waits for the next gather");
        let second = pass.unshard(unit(1))?;
        assert_eq!(second.as_f32(0).map(<[f32]>::as_ptr), place);
        assert_eq!(live(), of_a_unit);
        drop(pass);
        drop(step);
        assert_eq!(live(), of_a_unit, "the aborted step has let go of all but what is lent");
        drop(second);
        assert_eq!(live(), ByteCount::ZERO);
        Ok(())
    });
}

/// A caller that holds more units than the plan counts on uses more memory than planned; dropping
/// them frees all of the excess.
#[test]
fn what_waits_and_what_is_held_are_together_no_more_than_planned() {
    let _turn = alone();
    let unused = Unused::Zeros;
    let options = ModelOptions { prefetch: 1, unused, ..ModelOptions::on(mesh(1, 2)) };
    on_ranks(2, |world| {
        let mut model = springs::model_of(world, &uneven_units(), &options)?;
        let rank = model.rank();
        let planned = model.plan().memory().full;
        let live = move || memory::usage(rank, Category::Full).live;
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        let mut pass = step.microbatch()?;
        let all = (0..5).map(|index| pass.unshard(unit(index))).collect::<Result<Vec<_>, _>>()?;
        assert!(live() > planned);
        drop(all);
        let _ = pass.loss(LossSum::new(0.0, 1))?;
        for index in (0..5).rev() {
            drop(pass.unshard(unit(index))?);
            assert!(live() <= planned, "{} after unit {index}, planned {planned}", live());
        }
        pass.finish()?;
        step.finish().map(drop)
    });
}

#[test]
fn nothing_is_left_when_the_model_is_dropped() {
    let _turn = alone();
    for accumulation in Accumulation::ALL {
        let options = ModelOptions { accumulation, ..ModelOptions::on(mesh(2, 2)) };
        let _ = peaks(&uneven_units(), &options);
        assert_nothing_is_left(&format!("{accumulation}"));
    }
}

#[test]
fn nothing_is_left_of_steps_that_were_aborted() {
    let _turn = alone();
    let options = ModelOptions::on(mesh(2, 2));
    on_ranks(4, |world| {
        let mut model = springs::model_of(world, &uneven_units(), &options)?;
        let before = live(model.rank());
        for _ in 0..3 {
            let mut step = model.begin_step(StepOptions::microbatches(2))?;
            let survived = slopes::microbatch(&mut step, 1.0);
            assert!(survived.is_ok() || matches!(survived, Err(Error::Comm(_))), "{survived:?}");
            drop(step);
        }
        train(&mut model, 1)?;
        drop(model.begin_step(StepOptions::microbatches(1))?);
        assert_eq!(live(model.rank()), before);
        Ok(())
    });
    assert_nothing_is_left("aborted steps");
}

/// A model of 4 MB that four ranks import: each allocates its quarter, and blocks of the file.
#[test]
fn no_rank_has_more_than_its_part_of_what_it_imports() {
    let _turn = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let numel = 1_000_000;
    let weights: Vec<u8> = (0..numel).flat_map(|at: u32| (at as f32).to_le_bytes()).collect();
    let view = TensorView::new(safetensors::Dtype::F32, vec![numel as usize], &weights);
    let file = folder.path().join("model.safetensors");
    safetensors::serialize_to_file([("w", view.expect("a tensor"))], None, &file).expect("written");
    let spec = ModelSpec::new().unit(Unit::new("u").param(Param::new("w", [numel as usize])));
    let options = ModelOptions::on(mesh(1, 4));
    let allocated = on_ranks(4, |world| {
        let first = world.rank().index() == 0;
        let all = world.world_group(Channel::User);
        let wait = || -> Result<(), Error> { Ok(all.barrier(Tag::default())?.wait()?) };
        wait()?;
        let before = memory::allocations();
        wait()?;
        let from = Import::of(folder.path());
        let model = ShardedModel::import(world, spec.clone(), options.clone(), &from)?.model;
        wait()?;
        let allocated = memory::allocations().since(before).bytes;
        wait()?;
        assert!(model.full_parameters()?["w"].iter().enumerate().all(|(at, it)| *it == at as f32));
        Ok(if first { allocated } else { ByteCount::ZERO })
    });
    // All four together: their quarters, and a block of 256 KiB each with what else there is.
    let whole = 4 * u64::from(numel);
    let blocks = 4 * 300_000;
    assert!((whole..whole + blocks).contains(&allocated[0].0), "{allocated:?}");
}

/// The copy that a background save makes is as large as planned, and the next save uses the same
/// memory.
#[test]
fn a_save_in_the_background_holds_one_copy_of_what_a_rank_writes() {
    let _turn = alone();
    for (on, state) in places([(1, 1), (2, 3), (1, 5)]) {
        let folder = tempfile::tempdir().expect("a folder");
        let options = ModelOptions { state, ..ModelOptions::on(on) };
        on_ranks(options.mesh.world_size(), |world| {
            let mut model = springs::model_of(world, &with_kept_units(), &options)?;
            let mut adamw = AdamW::new(&model, AdamWOptions::default());
            let rank = model.rank();
            let with = CheckpointOptions::default();
            let mut checkpoints = Checkpoints::open(&model, folder.path(), with)?;
            let planned = model.plan().snapshot(rank);
            for _ in 0..2 {
                train_with(&mut model, &mut adamw, 1)?;
                checkpoints.save_in_background(&model, &adamw, &serde_json::Value::Null)?;
                checkpoints.finish(&model)?;
                let Usage { live, peak } = memory::usage(rank, Category::Snapshot);
                assert_eq!((live, peak), (planned, planned), "rank {rank}");
            }
            Ok(())
        });
        assert_nothing_is_left("dropped checkpoints");
        memory::reset_peaks();
    }
}

/// Adds a unit with two buffers: one is written by the first rank, and one by the second.
fn with_buffers() -> ModelSpec {
    let norm = Unit::new("bn")
        .param(Param::new("bn.weight", [300]))
        .param(Param::new("bn.mean", [700]).buffer())
        .param(Param::new("bn.own", [90]).averaged_buffer());
    uneven_units().unit(norm)
}

#[test]
fn buffers_their_averages_and_their_copies_for_a_save_are_as_planned() {
    let _turn = alone();
    for (on, state) in places([(1, 1), (1, 2), (2, 2), (4, 1)]) {
        for averages in 0..=2 {
            memory::reset_peaks();
            let spec = (0..averages).fold(with_buffers(), |spec, _| spec.averaged());
            let options = ModelOptions { state, ..ModelOptions::on(on) };
            let folder = tempfile::tempdir().expect("a folder");
            on_ranks(options.mesh.world_size(), |world| {
                let mut model = springs::model_of(world, &spec, &options)?;
                let mut adamw = AdamW::new(&model, AdamWOptions::default());
                let emas = (0..averages).map(|_| Ema::new(&model, 0.9));
                let mut emas: Vec<Ema> = emas.collect::<Result<_, _>>()?;
                let rank = model.rank();
                for number in 0..2 {
                    let mut step = model.begin_step(StepOptions::microbatches(2))?;
                    for _ in 0..2 {
                        let pass = step.microbatch()?;
                        let handle = pass.handle();
                        for (id, buffer) in spec.buffers() {
                            handle.write_buffer(id, &vec![number as f32; buffer.numel()])?;
                        }
                        springs::forward_and_backward(pass, Batch::of(rank.index(), number, 0))?;
                    }
                    let gradients = step.finish()?;
                    adamw.step(&mut model, gradients)?;
                }
                let planned = model.plan().memory().buffers;
                assert_eq!(planned, ByteCount(4 * (2 + averages) * 790));
                let Usage { live, peak } = memory::usage(rank, Category::Buffers);
                assert_eq!([live, peak], [planned; 2], "rank {rank}, {averages} averages");
                let planned = model.plan().optimizer_state(rank);
                let Usage { live, peak } = memory::usage(rank, Category::Optimizer);
                let how = format!("rank {rank} of {on}, {averages} averages, state over {state}");
                assert_eq!([live, peak], [planned; 2], "{how}");
                // A checkpoint has one average at most.
                let copied = match emas.pop() {
                    None => snapshot(&model, &adamw, folder.path())?,
                    Some(ema) if averages == 1 => snapshot(&model, &(adamw, ema), folder.path())?,
                    Some(_) => model.plan().snapshot(rank),
                };
                assert_eq!(copied, model.plan().snapshot(rank), "rank {rank}, {averages} averages");
                Ok(())
            });
            assert_nothing_is_left("buffers");
        }
    }
}

/// Saves in the background. Returns the bytes of the copy.
fn snapshot<O: Checkpointed>(
    model: &ShardedModel,
    optimizer: &O,
    folder: &Path,
) -> Result<ByteCount, Error> {
    let mut checkpoints = Checkpoints::open(model, folder, CheckpointOptions::default())?;
    checkpoints.save_in_background(model, optimizer, &serde_json::Value::Null)?;
    checkpoints.finish(model)?;
    Ok(memory::usage(model.rank(), Category::Snapshot).live)
}

#[test]
fn twenty_steps_hold_no_more_than_three() {
    let _turn = alone();
    for accumulation in Accumulation::ALL {
        let options = ModelOptions { accumulation, ..ModelOptions::on(mesh(2, 2)) };
        let grown = on_ranks(4, |world| {
            let mut model = springs::model_of(world, &uneven_units(), &options)?;
            let mut adamw = AdamW::new(&model, AdamWOptions::default());
            let mut held = Vec::new();
            for _ in 0..20 {
                train_with(&mut model, &mut adamw, 2)?;
                held.push((live(model.rank()), all_peaks(model.rank())));
            }
            Ok(held)
        });
        for (rank, held) in grown.into_iter().enumerate() {
            assert_eq!(held[19], held[2], "rank {rank}, {accumulation}");
        }
    }
}

/// Returns each mesh of `replicate` x `shard` ranks with each division of state.
fn places<const COUNT: usize>(
    sizes: [(usize, usize); COUNT],
) -> impl Iterator<Item = (Mesh, StateOver)> {
    let in_both = |on| StateOver::ALL.map(|state| (on, state));
    meshes(sizes).into_iter().flat_map(in_both)
}

/// Peaks that were measured, beside those that were planned.
#[derive(Default)]
struct Compared {
    table: String,
    /// The lines that differ by more than 2%.
    off: Vec<String>,
}

impl Compared {
    /// Measures two steps on every rank, in every category.
    fn add(&mut self, name: &str, spec: &ModelSpec, options: &ModelOptions) {
        let _turn = alone();
        for (rank, (measured, planned)) in peaks(spec, options).into_iter().enumerate() {
            for (category, measured) in Category::COUNTED.into_iter().zip(measured) {
                let planned = of(&planned, category);
                let numbers = format!("measured {}, planned {}", measured.0, planned.0);
                let line = format!("{name}: rank {rank}, {category}: {numbers}");
                if rank == 0 {
                    let _ = writeln!(self.table, "{line}");
                }
                if measured.0.abs_diff(planned.0) * 50 > planned.0 {
                    self.off.push(line);
                }
            }
        }
    }

    /// The lines of rank 0, if no line of any rank is off.
    fn table(self) -> String {
        assert!(self.off.is_empty(), "more than 2% off:\n{}", self.off.join("\n"));
        self.table
    }
}

/// The peaks of two steps of two microbatches on every rank, and what was planned.
fn peaks(spec: &ModelSpec, options: &ModelOptions) -> Vec<(Vec<ByteCount>, MemoryPlan)> {
    memory::reset_peaks();
    on_ranks(options.mesh.world_size(), |world| {
        let mut model = springs::model_of(world, spec, options)?;
        train(&mut model, 2)?;
        let plan = model.plan();
        let rank = model.rank();
        let shard = plan.masters(rank);
        let optimizer = plan.optimizer_state(rank);
        let planned = MemoryPlan { shard, optimizer, ..plan.memory() };
        Ok((all_peaks(rank), planned))
    })
}

fn train(model: &mut ShardedModel, steps: usize) -> Result<(), Error> {
    let mut adamw = AdamW::new(model, AdamWOptions::default());
    (0..steps).try_for_each(|_| train_with(model, &mut adamw, 2))
}

fn train_with(
    model: &mut ShardedModel,
    adamw: &mut AdamW,
    microbatches: usize,
) -> Result<(), Error> {
    let mut step = model.begin_step(StepOptions::microbatches(microbatches))?;
    for _ in 0..microbatches {
        slopes::microbatch(&mut step, 0.5)?;
    }
    let gradients = step.finish()?;
    adamw.step(model, gradients).map(drop)
}

/// Five units of sizes that go up and down, so that the peak is not where a wrong formula would
/// have it. Some are large enough for worker threads to take part.
fn uneven_units() -> ModelSpec {
    let shapes = [[96, 400], [11, 3], [64, 64], [128, 500], [7, 100]];
    let units = shapes
        .into_iter()
        .enumerate()
        .map(|(index, shape)| layer(&format!("layer.{index}"), shape));
    units.fold(ModelSpec::new(), ModelSpec::unit)
}

/// The same, of which two units are kept.
fn with_kept_units() -> ModelSpec {
    let keep = |(index, unit): (usize, &Unit)| {
        if index % 2 == 1 { unit.clone().keep() } else { unit.clone() }
    };
    uneven_units().units().iter().enumerate().map(keep).fold(ModelSpec::new(), ModelSpec::unit)
}

fn of(plan: &MemoryPlan, category: Category) -> ByteCount {
    match category {
        Category::Shard => plan.shard,
        Category::GatherInput => plan.gather_input,
        Category::Full => plan.full,
        Category::GradFull => plan.grad_full,
        Category::Partial => plan.partial,
        Category::Optimizer => plan.optimizer,
        Category::Update => plan.update,
        Category::Buffers => plan.buffers,
        Category::Snapshot | Category::Load | Category::Other => ByteCount::ZERO,
    }
}

fn all_peaks(rank: Rank) -> Vec<ByteCount> {
    Category::COUNTED.map(|category| memory::usage(rank, category).peak).to_vec()
}

fn live(rank: Rank) -> Vec<ByteCount> {
    Category::COUNTED.map(|category| memory::usage(rank, category).live).to_vec()
}

fn assert_nothing_is_left(what: &str) {
    for rank in (0..8).map(Rank::new) {
        assert!(
            live(rank).iter().all(|left| *left == ByteCount::ZERO),
            "{what}: rank {rank}: {:?}",
            live(rank)
        );
    }
}
