//! Two objects of one world that could be taken for each other: models of one spec, averages,
//! checkpoints, optimizers. Ranks that use them in different orders get an error that names both.

use hsdp::checkpoint::{CheckpointOptions, Checkpoints, Import};
use hsdp::{
    Ema, Error, ModelLabel, ModelOptions, ModelSpec, Muon, MuonOptions, Optimizer, Param, Selected,
    Sgd, SgdOptions, ShardedModel, StepOptions, Unit, World, WorldOptions,
};
use hsdp_comm::Between;
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::worlds::{DEADLINE, common_error, launched, mesh};

const MESHES: [(usize, usize); 4] = [(1, 2), (2, 1), (2, 2), (1, 3)];

/// How each rank ends, between threads that share memory and between those that exchange messages,
/// on each mesh.
fn on_all_meshes<T: Send>(
    run: impl Fn(World, &ModelOptions) -> Result<T, Error> + Sync,
    check: impl Fn(Vec<Result<T, Error>>),
) {
    on_meshes(&MESHES, run, check);
}

fn on_meshes<T: Send>(
    meshes: &[(usize, usize)],
    run: impl Fn(World, &ModelOptions) -> Result<T, Error> + Sync,
    check: impl Fn(Vec<Result<T, Error>>),
) {
    for between in [Between::Memory, Between::Messages] {
        for (replicate, shard) in meshes.iter().copied() {
            let on = ModelOptions::on(mesh(replicate, shard));
            let options = WorldOptions { between, deadline: DEADLINE, ..WorldOptions::default() };
            let ends = launched(replicate * shard, options, |world| run(world, &on));
            check(ends.into_iter().map(|end| end.expect("no rank panics")).collect());
        }
    }
}

/// Has rank 1 call `crossed`, and the others `straight`; the error that all of them get.
fn errors_of<S: Send>(
    make: impl Fn(World, &ModelOptions) -> Result<S, Error> + Sync,
    act: impl Fn(&mut S, bool) -> Result<(), Error> + Sync,
    named: [&str; 2],
) {
    errors_of_meshes(&MESHES, make, act, named);
}

fn errors_of_meshes<S: Send>(
    meshes: &[(usize, usize)],
    make: impl Fn(World, &ModelOptions) -> Result<S, Error> + Sync,
    act: impl Fn(&mut S, bool) -> Result<(), Error> + Sync,
    named: [&str; 2],
) {
    for is_crossed in [false, true] {
        let run = |world: World, on: &ModelOptions| {
            let crosses = is_crossed && world.rank().index() == 1;
            act(&mut make(world, on)?, crosses)
        };
        on_meshes(meshes, run, |ends| {
            if !is_crossed {
                ends.into_iter().for_each(|end| end.expect("all do the same"));
                return;
            }
            let error = ends.into_iter().map(|end| end.expect_err("rank 1 does another thing"));
            let texts: Vec<String> = error.map(|error| error.to_string()).collect();
            for text in &texts {
                assert!(named.iter().all(|name| text.contains(name)), "{text}");
            }
        });
    }
}

fn spec() -> ModelSpec {
    let unit = |name: &str| {
        let param = |it: &str| Param::new(format!("{name}.{it}"), [4, 4]);
        Unit::new(name).param(param("left")).param(param("right"))
    };
    ModelSpec::new().unit(unit("first")).unit(unit("second"))
}

fn one(world: World, on: &ModelOptions) -> Result<ShardedModel, Error> {
    springs::model_of(world, &spec(), on)
}

fn two(world: World, on: &ModelOptions) -> Result<[ShardedModel; 2], Error> {
    Ok([one(world.clone(), on)?, one(world, on)?])
}

/// An actor and a critic, by their names.
fn named(world: World, on: &ModelOptions) -> Result<[ShardedModel; 2], Error> {
    let make = |name: &str| {
        let on = ModelOptions { name: Some(name.to_owned()), ..on.clone() };
        springs::model_of(world.clone(), &spec(), &on)
    };
    Ok([make("actor")?, make("critic")?])
}

fn step(model: &mut ShardedModel) -> Result<(), Error> {
    let mut sgd = Sgd::new(model, SgdOptions::default());
    let gradients = springs::gradients(model, 1)?;
    sgd.step(model, gradients).map(drop)
}

/// What ranks do with each of two models, in one order or in the other.
type Act = fn(&mut ShardedModel) -> Result<(), Error>;

fn each(models: &mut [ShardedModel; 2], crosses: bool, act: Act) -> Result<(), Error> {
    let order = if crosses { [1, 0] } else { [0, 1] };
    order.into_iter().try_for_each(|at| act(&mut models[at]))
}

/// Acts that are collective over the world.
const OF_THE_WORLD: [Act; 5] = [
    step,
    |model| model.end_run(),
    |model| model.evaluation()?.mean(1.0, 1).map(drop),
    |model| model.norms().map(drop),
    |model| model.histograms().map(drop),
];

/// Acts that are collective over the shard group. No such call meets one of another shard group.
const OF_SHARDS: [Act; 1] = [|model| model.full_parameters().map(drop)];

/// Meshes that are one shard group.
const SHARDED: [(usize, usize); 2] = [(1, 2), (1, 3)];

#[test]
fn two_equal_models_that_are_used_in_different_orders_are_named() {
    let named = ["model 0, ", "model 1, "];
    for act in OF_THE_WORLD {
        errors_of(two, |models, crosses| each(models, crosses, act), named);
    }
    for act in OF_SHARDS {
        errors_of_meshes(&SHARDED, two, |models, crosses| each(models, crosses, act), named);
    }
}

#[test]
fn models_with_names_are_named_by_them() {
    let names = ["model 0 `actor`, header", "model 1 `critic`, header"];
    errors_of(named, |models, crosses| each(models, crosses, step), names);
}

#[test]
fn an_evaluation_that_meets_that_of_another_model_in_its_batch_is_named() {
    let act: Act = |model| {
        let mut evaluation = model.evaluation()?;
        let pass = evaluation.batch()?;
        pass.finish()?;
        evaluation.mean(1.0, 1).map(drop)
    };
    errors_of(two, |models, crosses| each(models, crosses, act), ["model 0, ", "model 1, "]);
}

/// Steps of two models are open at a time, as in adversarial training: all-reduces are issued when
/// their sums are ready.
#[test]
fn two_models_may_be_in_their_steps_at_a_time_and_are_named_if_ranks_cross_them() {
    let act = |[actor, critic]: &mut [ShardedModel; 2], crosses: bool| {
        let rank = actor.rank().index();
        let mut steps = [
            actor.begin_step(StepOptions::microbatches(1))?,
            critic.begin_step(StepOptions::microbatches(1))?,
        ];
        let order = if crosses { [1, 0] } else { [0, 1] };
        for at in order {
            springs::microbatch(&mut steps[at], Batch::of(rank, 0, 0))?;
        }
        steps.into_iter().try_for_each(|step| step.finish().map(drop))
    };
    errors_of(two, act, ["model 0, ", "model 1, "]);
}

#[test]
fn two_equal_models_that_are_made_in_different_orders_are_told_apart_by_their_names() {
    let run = |world: World, on: &ModelOptions| {
        let name = if world.rank().index() == 1 { "critic" } else { "actor" };
        one(world, &ModelOptions { name: Some(name.to_owned()), ..on.clone() }).map(drop)
    };
    on_all_meshes(run, |ends| {
        let error = common_error(ends).to_string();
        let expected = "the model that is made differs between ranks: \
                        rank 1 has model 0 `critic`, rank 0 has model 0 `actor`";
        assert_eq!(error, expected);
    });
}

#[test]
fn a_name_on_some_ranks_alone_is_a_difference() {
    let run = |world: World, on: &ModelOptions| {
        let name = (world.rank().index() == 1).then(|| "critic".to_owned());
        one(world, &ModelOptions { name, ..on.clone() }).map(drop)
    };
    on_all_meshes(run, |ends| {
        let error = common_error(ends).to_string();
        let expected = "the model that is made differs between ranks: \
                        rank 1 has model 0 `critic`, rank 0 has model 0";
        assert_eq!(error, expected);
    });
}

#[test]
fn a_name_that_does_not_fit_is_refused_on_all_ranks() {
    for name in ["", "a\nb", "a`b", &"x".repeat(33)] {
        let run = |world: World, on: &ModelOptions| {
            one(world, &ModelOptions { name: Some(name.to_owned()), ..on.clone() }).map(drop)
        };
        on_all_meshes(run, |ends| {
            for end in ends {
                let text = end.expect_err("it is refused").to_string();
                assert!(text.contains("the name of a model has 1 to 32 bytes"), "{text}");
                assert!(!text.contains('\n'), "{text}");
            }
        });
    }
}

/// Numbers are never used again, and stay equal after a creation that only some ranks have
/// survived.
#[test]
fn models_are_numbered_in_the_order_in_which_they_were_made() {
    let run = |world: World, on: &ModelOptions| {
        let rank = world.rank().index();
        let mut numbers = vec![one(world.clone(), on)?.label()];
        let lacking = usize::from(rank == 1);
        let failed = ShardedModel::new(world.clone(), spec(), on.clone(), |param| {
            vec![0.5; param.numel() - lacking]
        });
        failed.expect_err("rank 1 has too few values");
        let named = ModelOptions { name: Some("b".to_owned()), ..on.clone() };
        let second = one(world.clone(), &named)?;
        numbers.push(second.label());
        let mut third = one(world, on)?;
        numbers.push(third.label());
        drop(second);
        step(&mut third)?;
        third.end_run()?;
        Ok(numbers.iter().map(ModelLabel::to_string).collect::<Vec<_>>())
    };
    on_all_meshes(run, |ends| {
        for end in ends {
            assert_eq!(end.expect("all go on"), ["model 0", "model 1 `b`", "model 2"]);
        }
    });
}

#[test]
fn an_imported_model_has_a_number_too() {
    let folder = tempfile::tempdir().expect("a folder");
    let values: Vec<u8> = vec![0; 4 * 16];
    let names = ["first.left", "first.right", "second.left", "second.right"];
    let view = |name: &str| {
        let view =
            safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![4, 4], &values);
        (name.to_owned(), view.expect("16 elements"))
    };
    let path = folder.path().join("model.safetensors");
    safetensors::serialize_to_file(names.map(view), None, &path).expect("written");
    let make = |world: World, on: &ModelOptions| {
        let import = |world: World| {
            let import = Import::of(folder.path());
            ShardedModel::import(world, spec(), on.clone(), &import).map(|it| it.model)
        };
        Ok([import(world.clone())?, import(world)?])
    };
    errors_of(make, |models, crosses| each(models, crosses, step), ["model 0, ", "model 1, "]);
}

#[test]
fn averages_that_ranks_evaluate_in_different_orders_are_named() {
    let make = |world: World, on: &ModelOptions| {
        let model = one(world, on)?;
        let averages = [Ema::new(&model, 0.5)?, Ema::new(&model, 0.5)?];
        Ok((model, averages))
    };
    for act in OF_SHARDS.iter().chain(&OF_THE_WORLD[2..]) {
        errors_of_meshes(
            &SHARDED,
            make,
            |(model, averages), crosses| {
                let order = if crosses { [1, 0] } else { [0, 1] };
                order.into_iter().try_for_each(|at| model.with_shards(&averages[at], *act))
            },
            ["average 1, ", "average 2, "],
        );
        // The model itself on one rank, an average on the others.
        errors_of_meshes(
            &SHARDED,
            make,
            |(model, averages), crosses| match crosses {
                false => model.with_shards(&averages[0], *act),
                true => act(model),
            },
            ["average 1, ", "rank 1: "],
        );
    }
}

/// Ranks drop an average at different times, between two updates.
#[test]
fn an_average_keeps_its_number_whatever_a_rank_has_dropped() {
    let run = |world: World, on: &ModelOptions| {
        let rank = world.rank().index();
        let mut model = one(world, on)?;
        let mut first = Some(Ema::new(&model, 0.5)?);
        let second = Ema::new(&model, 0.25)?;
        step(&mut model)?;
        first.take_if(|_| rank == 1);
        model.with_shards(&second, |model| model.full_parameters())?;
        let third = Ema::new(&model, 0.125)?;
        model.with_shards(&third, |model| model.full_parameters())?;
        drop(first);
        step(&mut model)?;
        model.with_shards(&second, |model| model.full_parameters())?;
        model.end_run()
    };
    on_all_meshes(run, |ends| ends.into_iter().for_each(|end| end.expect("all do the same")));
}

#[test]
fn checkpoints_in_two_folders_that_ranks_save_in_different_orders_are_named() {
    let make = |world: World, on: &ModelOptions| {
        let model = one(world.clone(), on)?;
        // The ranks of a world save to one folder each time: the name is handed out by rank 0.
        let folder = tempfile::tempdir().expect("a folder").keep();
        let folder = world.broadcast(folder, hsdp::Rank::new(0))?;
        let open = |name: &str| {
            Checkpoints::open(&model, &folder.join(name), CheckpointOptions::default())
        };
        let opened = [open("often")?, open("rarely")?];
        let sgd = Sgd::new(&model, SgdOptions::default());
        Ok((model, sgd, opened))
    };
    let saves = |(model, sgd, opened): &mut (ShardedModel, Sgd, [Checkpoints; 2]), crosses| {
        let order = if crosses { [1, 0] } else { [0, 1] };
        let user = serde_json::json!(1);
        order.into_iter().try_for_each(|at: usize| opened[at].save(model, sgd, &user).map(drop))
    };
    errors_of(make, saves, ["checkpoints 0, ", "checkpoints 1, "]);
    let loads = |(model, sgd, opened): &mut (ShardedModel, Sgd, [Checkpoints; 2]), crosses| {
        let order = if crosses { [1, 0] } else { [0, 1] };
        order.into_iter().try_for_each(|at: usize| opened[at].load_latest(model, sgd).map(drop))
    };
    errors_of(make, loads, ["checkpoints 0, ", "checkpoints 1, "]);
}

/// A rank asks for the parameters, or their norms, where the others ask for those of the gradients.
#[test]
fn parameters_and_gradients_that_meet_are_named() {
    let norms = |model: &mut ShardedModel, crosses: bool| {
        let gradients = springs::gradients(model, 1)?;
        if crosses { model.norms() } else { gradients.norms(model) }.map(drop)
    };
    let full = |model: &mut ShardedModel, crosses: bool| {
        let gradients = springs::gradients(model, 1)?;
        if crosses { model.full_parameters() } else { gradients.full(model) }.map(drop)
    };
    let named = ["gradients, ", "rank 1: "];
    errors_of(one, norms, named);
    errors_of_meshes(&SHARDED, one, full, named);
}

/// Two optimizers of equal shapes that exchange data.
#[test]
fn optimizers_that_ranks_call_in_different_orders_are_named() {
    let update = |model: &mut ShardedModel, crosses: bool| {
        let make = || Muon::new(model, MuonOptions::default());
        let mut first = make();
        let mut second = make();
        let gradients = springs::gradients(model, 1)?;
        let in_first = |param: &Param| param.name.starts_with("first");
        let in_second = |param: &Param| param.name.starts_with("second");
        let of_first: Selected<'_> = (&mut first, &in_first);
        let of_second: Selected<'_> = (&mut second, &in_second);
        let both = if crosses { [of_second, of_first] } else { [of_first, of_second] };
        model.update_by(gradients, both).map(drop)
    };
    let named = ["optimizer of parameter 0, ", "optimizer of parameter 2, "];
    errors_of_meshes(&SHARDED, one, update, named);
}

#[test]
fn an_optimizer_without_parameters_is_not_taken_for_that_of_the_first_one() {
    let update = |model: &mut ShardedModel, crosses: bool| {
        let make = || Muon::new(model, MuonOptions::default());
        let mut idle = make();
        let mut only = make();
        let gradients = springs::gradients(model, 1)?;
        let of_none: Selected<'_> = (&mut idle, &|_| false);
        let of_all: Selected<'_> = (&mut only, &|_| true);
        let both = if crosses { [of_all, of_none] } else { [of_none, of_all] };
        model.update_by(gradients, both).map(drop)
    };
    let named = ["optimizer of parameter 0, ", "optimizer of parameter 4, "];
    errors_of_meshes(&SHARDED, one, update, named);
}

#[test]
fn an_explanation_of_flight_records_names_the_models() {
    let on = ModelOptions::on(mesh(1, 2));
    let options = WorldOptions { deadline: DEADLINE, ..WorldOptions::default() };
    let records = launched(2, options, |world| {
        let crosses = world.rank().index() == 1;
        let ended = named(world.clone(), &on).and_then(|mut it| each(&mut it, crosses, step));
        ended.expect_err("they cross");
        world.flight_record()
    });
    let records: Vec<_> = records.into_iter().map(|it| it.expect("no panic")).collect();
    let read = |record: &hsdp::FlightRecord| {
        let read = hsdp::FlightRecord::from_json(&record.to_json()).expect("a record");
        assert_eq!(read, *record);
    };
    records.iter().for_each(read);
    let explanation = hsdp::explain(&records);
    assert_eq!(explanation.models.len(), 2);
    let text = explanation.to_string();
    for row in
        ["rank 0: all_gather u64 9 elements, model 0 `actor`, header", "model 1 `critic`, header"]
    {
        assert!(text.contains(row), "{text}");
    }
}
