//! Checkpoints of other parameters than those of the model: what fits is taken, and the rest is
//! listed.

use std::collections::BTreeMap;
use std::path::Path;

use hsdp::checkpoint::{
    CheckpointOptions, Checkpointed, Checkpoints, Content, OtherParameters, Resumed, Weights,
};
use hsdp::{
    Adafactor, AdafactorOptions, AdamW, AdamWOptions, DType, Ema, Error, Gradients, Lion,
    LionOptions, Mesh, ModelOptions, ModelSpec, Muon, MuonOptions, Optimizer, Param, Precision,
    Selected, Sgd, SgdOptions, ShardedModel, StateOver, StepOptions, Unit, Update, Whole,
    WholeParameters, World,
};
use hsdp_kernels::Wire;
use hsdp_tests::support::models::storing_frozen;
use hsdp_tests::support::slopes;
use hsdp_tests::support::worlds::{common, common_error, mesh, meshes, on_ranks, outcomes};
use serde_json::json;
use tempfile::TempDir;

type Parameters = BTreeMap<String, Vec<f32>>;

/// An optimizer, or several, and the update by it.
trait Train: Checkpointed {
    fn make(model: &ShardedModel) -> Result<Self, Error>;

    fn train(&mut self, model: &mut ShardedModel, gradients: Gradients) -> Result<(), Error>;

    fn average(&self) -> Option<&Ema> {
        None
    }
}

macro_rules! train {
    ($optimizer:ty, $make:expr) => {
        impl Train for $optimizer {
            fn make(model: &ShardedModel) -> Result<Self, Error> {
                let make: fn(&ShardedModel) -> Self = $make;
                Ok(make(model))
            }

            fn train(
                &mut self,
                model: &mut ShardedModel,
                gradients: Gradients,
            ) -> Result<(), Error> {
                self.step(model, gradients).map(drop)
            }
        }
    };
}

train!(AdamW, |model| {
    let adamw = AdamW::new(model, AdamWOptions::default());
    adamw.group(|param| param.shape.len() == 1, |it| AdamWOptions { weight_decay: 0.0, ..it })
});
train!(Sgd, |model| Sgd::new(model, SgdOptions { momentum: 0.9, ..SgdOptions::default() }));
train!(Lion, |model| Lion::new(model, LionOptions::default()));
train!(Adafactor, |model| Adafactor::new(model, AdafactorOptions::default()));

/// AdamW in 8 bits, and averages.
type Both = (AdamW, Ema);

impl Train for Both {
    fn make(model: &ShardedModel) -> Result<Self, Error> {
        let adamw = AdamW::with_eight_bit_state(model, AdamWOptions::default());
        Ok((adamw, Ema::new(model, 0.5)?))
    }

    fn train(&mut self, model: &mut ShardedModel, gradients: Gradients) -> Result<(), Error> {
        self.0.step(model, gradients).map(drop)
    }

    fn average(&self) -> Option<&Ema> {
        Some(&self.1)
    }
}

fn is_matrix(param: &Param) -> bool {
    param.shape.len() == 2
}

impl Train for ((Muon, AdamW), Ema) {
    fn make(model: &ShardedModel) -> Result<Self, Error> {
        let muon = Muon::new(model, MuonOptions::default());
        let adamw = AdamW::new(model, AdamWOptions::default());
        Ok(((muon, adamw), Ema::new(model, 0.5)?))
    }

    fn train(&mut self, model: &mut ShardedModel, gradients: Gradients) -> Result<(), Error> {
        let (muon, adamw) = &mut self.0;
        let both: [Selected<'_>; 2] = [(muon, &is_matrix), (adamw, &|param| !is_matrix(param))];
        model.update_by(gradients, both).map(drop)
    }

    fn average(&self) -> Option<&Ema> {
        Some(&self.1)
    }
}

/// Moves a parameter along its gradient, less in each update.
fn slower(Whole { values, gradient, state, .. }: Whole<'_>) {
    state[0] += 1.0;
    values.iter_mut().zip(gradient).for_each(|(it, slope)| *it -= 0.1 * slope / state[0]);
}

impl Train for WholeParameters {
    fn make(model: &ShardedModel) -> Result<Self, Error> {
        let len = 2;
        Ok(WholeParameters::new(model, "counting", move |_| len))
    }

    fn train(&mut self, model: &mut ShardedModel, gradients: Gradients) -> Result<(), Error> {
        self.by(slower).step(model, gradients).map(drop)
    }
}

impl Train for (WholeParameters, AdamW) {
    fn make(model: &ShardedModel) -> Result<Self, Error> {
        Ok((WholeParameters::make(model)?, AdamW::new(model, AdamWOptions::default())))
    }

    fn train(&mut self, model: &mut ShardedModel, gradients: Gradients) -> Result<(), Error> {
        let whole = &mut self.0.by(slower);
        let adamw = &mut self.1;
        let both: [Selected<'_>; 2] = [(whole, &is_matrix), (adamw, &|param| !is_matrix(param))];
        model.update_by(gradients, both).map(drop)
    }
}

/// Parameters by name with their shapes; `*` marks a frozen one.
fn spec(params: &[(&str, &[usize])]) -> ModelSpec {
    let param = |(name, shape): &(&str, &[usize])| {
        let param = Param::new(name.trim_start_matches('*'), *shape).blocks(256);
        if name.starts_with('*') { param.frozen() } else { param }
    };
    let unit = |it: &(&str, &[usize])| Unit::new(it.0.trim_start_matches('*')).param(param(it));
    params.iter().map(unit).fold(ModelSpec::new(), ModelSpec::unit)
}

fn seed(param: &Param) -> u8 {
    param.name.bytes().fold(0, u8::wrapping_add)
}

fn init(param: &Param) -> Vec<f32> {
    (0..param.numel()).map(|at| ((at * 7) as f32 + f32::from(seed(param))).sin()).collect()
}

/// A place of a run: its mesh, the ranks over which state is divided, and the compute dtype, on
/// which no result depends: gradients do not follow parameters.
#[derive(Clone, Copy, Debug)]
struct Place {
    mesh: Mesh,
    state: StateOver,
    dtype: DType,
}

impl Place {
    fn ranks(self) -> usize {
        self.mesh.world_size()
    }

    fn options(self) -> ModelOptions {
        let Self { mesh, state, dtype } = self;
        let precision = Precision { parameters: dtype, ..Precision::default() };
        ModelOptions { state, precision, ..ModelOptions::on(mesh) }
    }
}

/// Returns the place of a mesh whose replicas each have all state.
fn over_shards(mesh: Mesh) -> Place {
    Place { mesh, state: StateOver::Shards, dtype: DType::F32 }
}

/// Returns the places of a mesh: replicas each have all state, divide it, and divide masters, too.
fn places(mesh: Mesh) -> [Place; 3] {
    let shards = over_shards(mesh);
    let world = Place { state: StateOver::World, ..shards };
    [shards, world, Place { dtype: DType::BF16, ..world }]
}

/// Returns places of two ranks.
fn of_two() -> impl Iterator<Item = Place> {
    places(mesh(2, 1)).into_iter().chain([over_shards(mesh(1, 2))])
}

fn model(world: World, spec: &ModelSpec, place: Place) -> Result<ShardedModel, Error> {
    ShardedModel::new(world, spec.clone(), place.options(), init)
}

/// Steps whose gradients depend on the number of the step and the parameter alone.
fn steps<O: Train>(
    model: &mut ShardedModel,
    by: &mut O,
    numbers: std::ops::Range<u8>,
) -> Result<(), Error> {
    numbers.into_iter().try_for_each(|number| {
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        slopes::microbatch_by(&mut step, &|param| {
            // A few bits, so that a mean over ranks is exact.
            Some(((f32::from(number) * 1.7 + f32::from(seed(param))).cos() * 64.0).round() / 64.0)
        })?;
        let gradients = step.finish()?;
        by.train(model, gradients)
    })
}

/// Parameters, and averages if there are any under a name with a star.
fn state<O: Train>(model: &mut ShardedModel, by: &O) -> Result<Parameters, Error> {
    let mut all = model.full_parameters()?;
    if let Some(average) = by.average() {
        let averages = model.with_shards(average, |model| model.full_parameters())?;
        all.extend(averages.into_iter().map(|(name, values)| (format!("*{name}"), values)));
    }
    Ok(all)
}

/// The state of a model that makes these steps from the beginning, on one rank.
fn alone<O: Train>(spec: &ModelSpec, numbers: std::ops::Range<u8>) -> Parameters {
    common(on_ranks(1, |world| {
        let mut model = model(world, spec, over_shards(mesh(1, 1)))?;
        let mut by = O::make(&model)?;
        steps(&mut model, &mut by, numbers.clone())?;
        state(&mut model, &by)
    }))
}

fn open(
    model: &ShardedModel,
    folder: &Path,
    content: Content,
    other: OtherParameters,
) -> Result<Checkpoints, Error> {
    let options =
        CheckpointOptions { content, other_parameters: other, ..CheckpointOptions::default() };
    Checkpoints::open(model, folder, options)
}

const FITTING: OtherParameters = OtherParameters::TakeFitting;
const MESHES: [(usize, usize); 4] = [(1, 2), (2, 1), (2, 2), (3, 1)];

/// Returns places between which runs go on: each mesh with the one that is `turn` behind it, in all
/// ways to divide state.
fn pairs(turn: usize) -> Vec<[Place; 2]> {
    let on = meshes(MESHES);
    let pairs = (0..MESHES.len()).map(|at| [on[at], on[(at + turn) % MESHES.len()]]);
    let in_all_ways = |[save, load]: [Mesh; 2]| {
        // From each way to the next one: checkpoints are interchanged.
        let [shards, world, rounded] = places(load);
        places(save).into_iter().zip([world, rounded, shards]).map(<[Place; 2]>::from)
    };
    pairs.flat_map(in_all_ways).collect()
}

/// Trains three steps of one model, and two of the other from its checkpoint. The second part
/// saves, and is resumed once more in between.
fn go<O: Train>(
    [first, second]: [&ModelSpec; 2],
    [save, load]: [Place; 2],
    content: Content,
) -> (Resumed, Parameters) {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    on_ranks(save.ranks(), |world| {
        let mut model = model(world, first, save)?;
        let mut by = O::make(&model)?;
        steps(&mut model, &mut by, 0..3)?;
        let mut checkpoints = open(&model, folder, content, OtherParameters::Refuse)?;
        checkpoints.save(&model, &by, &json!(7))
    });
    let refused = common_error(outcomes(load.ranks(), |world| {
        let mut model = model(world, second, load)?;
        let mut by = O::make(&model)?;
        let before = model.full_parameters()?;
        let mut checkpoints = open(&model, folder, content, OtherParameters::Refuse)?;
        let loaded = checkpoints.load_latest(&mut model, &mut by);
        assert!(model.full_parameters()? == before);
        loaded
    }));
    let told = refused.to_string();
    assert!(told.contains("other") || told.contains("is of another model"), "{told}");
    let resumed = common(on_ranks(load.ranks(), |world| {
        let mut model = model(world, second, load)?;
        let mut by = O::make(&model)?;
        let mut checkpoints = open(&model, folder, content, FITTING)?;
        let resumed = checkpoints.load_latest(&mut model, &mut by)?.expect("there is one");
        assert_eq!((resumed.step, model.applied_steps()), (3, 3));
        steps(&mut model, &mut by, 3..4)?;
        drop(checkpoints);
        let mut checkpoints = open(&model, folder, Content::All, OtherParameters::Refuse)?;
        checkpoints.save(&model, &by, &json!(7))?;
        Ok(resumed)
    }));
    let ended = common(on_ranks(save.ranks(), |world| {
        let mut model = model(world, second, save)?;
        let mut by = O::make(&model)?;
        let mut checkpoints = open(&model, folder, Content::All, OtherParameters::Refuse)?;
        checkpoints.load_latest(&mut model, &mut by)?.expect("there is one");
        steps(&mut model, &mut by, 4..5)?;
        state(&mut model, &by)
    }));
    (resumed, ended)
}

fn sorted(names: &[String]) -> Vec<&str> {
    let mut names: Vec<&str> = names.iter().map(|name| &**name).collect();
    names.sort_unstable();
    names
}

const A: (&str, &[usize]) = ("a", &[40, 10]);
const B: (&str, &[usize]) = ("b", &[3, 100]);
const C: (&str, &[usize]) = ("c", &[70]);

/// All that `names` name is the same in both, bit by bit.
fn assert_same(ended: &Parameters, expected: &Parameters, names: [&str; 2]) {
    for (name, values) in expected {
        let plain = name.trim_start_matches('*');
        if names.contains(&plain) {
            let bits = |values: &Vec<f32>| values.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
            assert!(bits(&ended[name]) == bits(values), "{name} differs");
        }
    }
}

fn frozen_then_trained_and_back<O: Train>() {
    let all = spec(&[A, B, C]);
    let without = spec(&[A, ("*b", B.1), ("*c", C.1)]);
    let whole = alone::<O>(&all, 0..5);
    for places in pairs(1) {
        for content in [Content::All, Content::Trainable] {
            // Trained anew: `a` goes on, and the others begin.
            let (resumed, ended) = go::<O>([&without, &all], places, content);
            let new: &[&str] = if content == Content::All { &[] } else { &["b", "c"] };
            assert_eq!(sorted(&resumed.new_parameters), new);
            assert_eq!(sorted(&resumed.new_states), ["b", "c"]);
            assert_eq!(sorted(&resumed.left_over), [""; 0]);
            assert_same(&ended, &whole, ["a", "a"]);
            assert_same(&ended, &alone::<O>(&all, 3..5), ["b", "c"]);
            // Frozen: `a` goes on, and the others stay as they were.
            let (resumed, ended) = go::<O>([&all, &without], places, content);
            assert!(resumed.new_parameters.is_empty() && resumed.new_states.is_empty());
            assert!(!resumed.left_over.is_empty());
            let is_state = |name: &String| {
                name.starts_with("optimizer:") && (name.ends_with(":b") || name.ends_with(":c"))
            };
            assert!(resumed.left_over.iter().all(is_state), "{:?}", resumed.left_over);
            assert_same(&ended, &whole, ["a", "a"]);
            let mut still = alone::<O>(&all, 0..3);
            still.retain(|name, _| !name.starts_with('*'));
            assert_same(&ended, &still, ["b", "c"]);
        }
    }
}

fn a_new_head<O: Train>() {
    let old = spec(&[A, C, B]);
    let new = spec(&[A, ("head", &[2, 40]), ("b", &[5, 100])]);
    let whole = alone::<O>(&old, 0..5);
    for places in pairs(2) {
        for content in [Content::All, Content::Trainable] {
            let (resumed, ended) = go::<O>([&old, &new], places, content);
            assert_eq!(sorted(&resumed.new_parameters), ["b", "head"]);
            assert_eq!(sorted(&resumed.new_states), ["b", "head"]);
            let left: Vec<&String> =
                resumed.left_over.iter().filter(|it| !it.starts_with("optimizer:")).collect();
            assert_eq!(left, ["b", "c"]);
            assert!(resumed.left_over.len() > 2);
            assert_same(&ended, &whole, ["a", "a"]);
            assert_same(&ended, &alone::<O>(&new, 3..5), ["b", "head"]);
        }
    }
}

#[test]
fn parameters_that_are_trained_anew_or_frozen_go_on_by_one_optimizer() {
    frozen_then_trained_and_back::<AdamW>();
    frozen_then_trained_and_back::<Lion>();
}

#[test]
fn parameters_that_are_trained_anew_or_frozen_go_on_by_other_optimizers() {
    frozen_then_trained_and_back::<Sgd>();
    frozen_then_trained_and_back::<WholeParameters>();
}

#[test]
fn parameters_that_are_trained_anew_or_frozen_go_on_with_averages() {
    frozen_then_trained_and_back::<Both>();
}

#[test]
fn a_head_is_new_or_gone_by_one_optimizer() {
    a_new_head::<AdamW>();
    a_new_head::<WholeParameters>();
}

#[test]
fn a_head_is_new_or_gone_with_averages() {
    a_new_head::<Both>();
}

/// Of a base that is stored in bf16 a checkpoint has the rounded values.
#[test]
fn parameters_that_were_stored_are_trained_anew_and_trained_ones_are_stored() {
    let trained = spec(&[A, B]);
    let stored = storing_frozen(&spec(&[A, ("*b", B.1)]), DType::BF16);
    let whole = alone::<AdamW>(&trained, 0..5);
    let before = alone::<AdamW>(&trained, 0..3);
    let rounded: Vec<f32> = before["b"].iter().map(|value| Wire::BF16.round(*value)).collect();
    let mut anew = None;
    for mesh in meshes(MESHES) {
        for state in StateOver::ALL {
            let place = Place { mesh, state, dtype: DType::BF16 };
            let (_, ended) = go::<AdamW>([&trained, &stored], [place; 2], Content::All);
            assert_same(&ended, &whole, ["a", "a"]);
            assert!(ended["b"] == rounded, "{place:?}");
            let (resumed, ended) = go::<AdamW>([&stored, &trained], [place; 2], Content::All);
            assert_eq!(sorted(&resumed.new_states), ["b"]);
            assert_same(&ended, &whole, ["a", "a"]);
            let b = &ended["b"];
            assert!(anew.get_or_insert_with(|| b.clone()) == b, "{place:?}");
            // The masters of the model have bits that the checkpoint's base lacks.
            let folder = tempfile::tempdir().expect("a folder");
            on_ranks(place.ranks(), |world| {
                let mut model = model(world, &stored, place)?;
                let mut by = AdamW::make(&model)?;
                steps(&mut model, &mut by, 0..1)?;
                let mut checkpoints = open(&model, folder.path(), Content::Trainable, FITTING)?;
                checkpoints.save(&model, &by, &json!(7))
            });
            let told = common_error(outcomes(place.ranks(), |world| {
                let mut model = model(world, &trained, place)?;
                let mut by = AdamW::make(&model)?;
                let mut checkpoints = open(&model, folder.path(), Content::Trainable, FITTING)?;
                checkpoints.load_latest(&mut model, &mut by)
            }));
            let told = told.to_string();
            assert!(told.contains("was saved with other frozen parameters"), "{place:?}: {told}");
        }
    }
}

/// The sums over ranks of these optimizers have other last bits on each mesh.
#[test]
fn optimizers_that_add_up_over_ranks_take_what_fits() {
    fn close<O: Train>() {
        let all = spec(&[A, B, C]);
        let without = spec(&[A, ("*b", B.1), ("*c", C.1)]);
        let whole = alone::<O>(&all, 0..5);
        let anew = alone::<O>(&all, 3..5);
        for load in places(mesh(2, 2)) {
            for content in [Content::All, Content::Trainable] {
                let from = over_shards(mesh(1, 2));
                let (resumed, ended) = go::<O>([&without, &all], [from, load], content);
                assert_eq!(sorted(&resumed.new_states), ["b", "c"]);
                for (name, values) in &ended {
                    let is_a = name.trim_start_matches('*') == "a";
                    let expected = if is_a { &whole[name] } else { &anew[name] };
                    let off = values.iter().zip(expected).map(|(it, other)| (it - other).abs());
                    let off = off.fold(0.0, f32::max);
                    assert!(off < 1e-5, "{name} is off by {off} on {load:?}");
                }
            }
        }
    }
    close::<Adafactor>();
    close::<((Muon, AdamW), Ema)>();
}

#[test]
fn what_fits_is_everything_where_nothing_differs() {
    let all = spec(&[A, ("*b", B.1), C]);
    for place in of_two() {
        for content in [Content::All, Content::Trainable] {
            let folder = tempfile::tempdir().expect("a folder");
            let resumed = on_ranks(2, |world| {
                let mut model = model(world, &all, place)?;
                let mut by = AdamW::make(&model)?;
                let mut checkpoints = open(&model, folder.path(), content, FITTING)?;
                steps(&mut model, &mut by, 0..2)?;
                checkpoints.save(&model, &by, &json!(null))?;
                let before = state(&mut model, &by)?;
                steps(&mut model, &mut by, 2..4)?;
                let resumed = checkpoints.load(&mut model, &mut by, 2)?;
                assert!(state(&mut model, &by)? == before);
                Ok(resumed)
            });
            let Resumed { new_parameters, new_states, left_over, .. } = common(resumed);
            assert!([new_parameters, new_states, left_over].iter().all(Vec::is_empty));
        }
    }
}

/// A checkpoint shows parameters that it leaves out by their digest alone.
#[test]
fn another_base_is_refused_also_where_what_fits_is_taken() {
    let first = spec(&[A, ("*b", B.1)]);
    let second = spec(&[A, B, C]);
    let folder = tempfile::tempdir().expect("a folder");
    on_ranks(2, |world| {
        let mut model = model(world, &first, over_shards(mesh(2, 1)))?;
        let mut by = AdamW::make(&model)?;
        steps(&mut model, &mut by, 0..2)?;
        let mut checkpoints = open(&model, folder.path(), Content::Trainable, FITTING)?;
        checkpoints.save(&model, &by, &json!(null))
    });
    let load = |change: f32, spec: &ModelSpec, place: Place| {
        outcomes(2, |world| {
            let options = place.options();
            let changed = |param: &Param| {
                let mut values = init(param);
                values[0] += if param.name == "b" { change } else { 0.0 };
                values
            };
            let mut model = ShardedModel::new(world, spec.clone(), options, changed)?;
            let mut by = AdamW::make(&model)?;
            let mut checkpoints = open(&model, folder.path(), Content::Trainable, FITTING)?;
            checkpoints.load_latest(&mut model, &mut by)
        })
    };
    let unfrozen = spec(&[A, B]);
    let with_head = spec(&[A, ("*b", B.1), C]);
    for place in of_two() {
        for fits in [&unfrozen, &with_head] {
            assert!(load(0.0, fits, place).iter().all(Result::is_ok));
            let told = common_error(load(1.0, fits, place)).to_string();
            assert!(told.contains("was saved with other frozen parameters"), "{told}");
        }
        // A new parameter beside one that was frozen: the digest can be of neither.
        let told = common_error(load(0.0, &second, place)).to_string();
        assert!(told.contains("was saved with other frozen parameters"), "{told}");
    }
}

#[test]
fn another_optimizer_is_refused_also_where_what_fits_is_taken() {
    let folder = tempfile::tempdir().expect("a folder");
    let told = common_error(outcomes(2, |world| {
        let mut model = model(world, &spec(&[A, B]), over_shards(mesh(1, 2)))?;
        let mut checkpoints = open(&model, folder.path(), Content::All, FITTING)?;
        checkpoints.save(&model, &Lion::make(&model)?, &json!(null))?;
        let mut adamw = AdamW::make(&model)?;
        checkpoints.load_latest(&mut model, &mut adamw)
    }));
    assert!(told.to_string().ends_with("its optimizer is lion, not adamw"), "{told}");
}

/// A new head keeps the values of the model, so an update of it that differs between ranks counts.
#[test]
fn parameters_that_stay_were_updated_alike() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    on_ranks(2, |world| {
        let mut model = model(world, &spec(&[A]), over_shards(mesh(2, 1)))?;
        let mut adamw = AdamW::make(&model)?;
        steps(&mut model, &mut adamw, 0..1)?;
        let mut checkpoints = open(&model, folder, Content::All, OtherParameters::Refuse)?;
        checkpoints.save(&model, &adamw, &json!(7))
    });
    let load = |world: World, place: Place, second: &ModelSpec, of_weights: bool| {
        let rank = world.rank().index();
        let mut model = model(world, second, place)?;
        let mut adamw = AdamW::make(&model)?;
        adamw.set_learning_rate([0.1, 0.2][rank]);
        steps(&mut model, &mut adamw, 0..1)?;
        let mut checkpoints = open(&model, folder, Content::All, FITTING)?;
        match of_weights {
            true => checkpoints.load_latest_weights(&mut model, Weights::Trained),
            false => checkpoints.load_latest(&mut model, &mut adamw),
        }
    };
    for place in places(mesh(2, 1)) {
        for of_weights in [false, true] {
            let more = spec(&[A, C]);
            let error = common_error(outcomes(2, |world| load(world, place, &more, of_weights)));
            assert!(error.to_string().contains("an option of the optimizer in step 0"), "{error}");
            // All trained parameters are those of the checkpoint: what was before does not count.
            common(on_ranks(2, |world| load(world, place, &spec(&[A]), of_weights)));
        }
    }
}

/// Trains three steps of one model, and two of the other from its checkpoint, by `train`. Between
/// them the other model is loaded and saved again `saves` times without a step.
fn resumed_after_saves<O: Train>(
    place: Place,
    [first, second]: [&ModelSpec; 2],
    saves: usize,
    train: impl Fn(&mut ShardedModel, &mut O) -> Result<(), Error> + Sync,
) -> Parameters {
    let folders: Vec<TempDir> =
        (0..=saves).map(|_| tempfile::tempdir().expect("a folder")).collect();
    on_ranks(2, |world| {
        let mut model = model(world, first, place)?;
        let mut by = O::make(&model)?;
        steps(&mut model, &mut by, 0..3)?;
        let mut checkpoints =
            open(&model, folders[0].path(), Content::All, OtherParameters::Refuse)?;
        checkpoints.save(&model, &by, &json!(7))
    });
    let loaded = |world: World, at: usize| {
        let mut model = model(world, second, place)?;
        let mut by = O::make(&model)?;
        let other = if at == 0 { FITTING } else { OtherParameters::Refuse };
        let mut checkpoints = open(&model, folders[at].path(), Content::All, other)?;
        checkpoints.load_latest(&mut model, &mut by)?.expect("there is one");
        Ok::<_, Error>((model, by))
    };
    for at in 0..saves {
        on_ranks(2, |world| {
            let (model, by) = loaded(world, at)?;
            let next = folders[at + 1].path();
            let mut checkpoints = open(&model, next, Content::All, OtherParameters::Refuse)?;
            checkpoints.save(&model, &by, &json!(7))
        });
    }
    common(on_ranks(2, |world| {
        let (mut model, mut by) = loaded(world, saves)?;
        train(&mut model, &mut by)?;
        state(&mut model, &by)
    }))
}

const OLD: [(&str, &[usize]); 3] = [A, ("b", &[6, 50]), C];
/// A matrix and a vector are new, and a matrix is a vector now, which another optimizer updates.
const NEW: [(&str, &[usize]); 5] = [A, ("head", &[2, 40]), ("b", &[300]), C, ("scale", &[30])];

#[test]
fn a_save_before_the_first_update_changes_nothing() {
    fn compare<O: Train>() {
        let old = spec(&OLD);
        let new = spec(&NEW);
        let train = |model: &mut ShardedModel, by: &mut O| steps(model, by, 3..5);
        let whole = alone::<O>(&old, 0..5);
        let anew = alone::<O>(&new, 3..5);
        for place in of_two() {
            let [without, once, twice] =
                [0, 1, 2].map(|saves| resumed_after_saves(place, [&old, &new], saves, train));
            assert!(without == once && once == twice);
            for (name, values) in &without {
                let goes_on = ["a", "c"].contains(&name.trim_start_matches('*'));
                let expected = if goes_on { &whole[name] } else { &anew[name] };
                let off = values.iter().zip(expected).map(|(it, other)| (it - other).abs());
                let off = off.fold(0.0, f32::max);
                assert!(off < 1e-5, "{name} is off by {off} on {place:?}");
            }
        }
    }
    compare::<((Muon, AdamW), Ema)>();
    compare::<(WholeParameters, AdamW)>();
}

/// The state of such a parameter would be dropped without a word. A program that selects the right
/// one afterwards goes on.
#[test]
fn a_parameter_whose_state_was_loaded_by_another_optimizer_is_refused() {
    fn compare<O: Train>(
        wrong: fn(&mut O, &mut ShardedModel, Gradients) -> Result<Update, Error>,
        expected: &str,
    ) {
        let old = spec(&OLD);
        let new = spec(&NEW);
        let right = |model: &mut ShardedModel, by: &mut O| steps(model, by, 3..5);
        let corrected = |model: &mut ShardedModel, by: &mut O| {
            let before = model.full_parameters()?;
            let gradients = slopes::gradients(model, 1.0)?;
            let told = wrong(by, model, gradients).expect_err("state would be lost");
            assert_eq!(told.to_string(), expected);
            assert!(model.full_parameters()? == before);
            right(model, by)
        };
        for place in of_two() {
            for saves in [0, 1] {
                let ended = resumed_after_saves(place, [&old, &new], saves, corrected);
                let expected = resumed_after_saves(place, [&old, &new], saves, right);
                assert!(ended == expected, "{saves} on {place:?}");
            }
        }
    }
    compare::<((Muon, AdamW), Ema)>(
        |((muon, adamw), _), model, gradients| {
            let is_head = |param: &Param| param.name == "head";
            let both: [Selected<'_>; 2] = [(muon, &is_head), (adamw, &|it| it.name != "head")];
            model.update_by(gradients, both)
        },
        "parameter `a`: muon has state of it, and optimizer 1 of the update (adamw) updates \
         it now; select it for muon",
    );
    compare::<(WholeParameters, AdamW)>(
        |(whole, adamw), model, gradients| {
            let is_head = |param: &Param| param.name == "head";
            let whole = &mut whole.by(slower);
            let both: [Selected<'_>; 2] = [(whole, &is_head), (adamw, &|it| it.name != "head")];
            model.update_by(gradients, both)
        },
        "parameter `a`: counting has state of it, and optimizer 1 of the update (adamw) updates \
         it now; select it for counting",
    );
    compare::<(WholeParameters, AdamW)>(
        |(whole, adamw), model, gradients| {
            let whole = &mut whole.by(slower);
            let both: [Selected<'_>; 2] = [
                (whole, &|it| is_matrix(it) || it.name == "c"),
                (adamw, &|it| !is_matrix(it) && it.name != "c"),
            ];
            model.update_by(gradients, both)
        },
        "parameter `c`: adamw has state of it, and optimizer 0 of the update (counting) \
         updates it now; select it for adamw",
    );
}

/// Without `left` another rank owns `right`, which has no state yet.
#[test]
fn a_parameter_without_state_may_get_another_owner() {
    let old = spec(&[("a", &[400])]);
    let new = spec(&[("a", &[400]), ("left", &[350]), ("middle", &[100]), ("right", &[60])]);
    let whole_and_sgd = |model: &mut ShardedModel, whole: &mut WholeParameters| {
        let mut sgd = Sgd::new(model, SgdOptions::default());
        for _ in 3..5 {
            let gradients = slopes::gradients(model, 1.0)?;
            let whole = &mut whole.by(slower);
            let both: [Selected<'_>; 2] =
                [(whole, &|it| it.name != "left"), (&mut sgd, &|it| it.name == "left")];
            model.update_by(gradients, both)?;
        }
        Ok(())
    };
    let trained = alone::<WholeParameters>(&old, 0..3);
    let moved = |from: f32, number: f32| from - 0.1 / number;
    for place in of_two() {
        let ended = resumed_after_saves::<WholeParameters>(place, [&old, &new], 0, whole_and_sgd);
        for (ended, from) in ended["a"].iter().zip(&trained["a"]) {
            assert_eq!(*ended, moved(moved(*from, 4.0), 5.0));
        }
        let right = &new[new.find("right").expect("a parameter")];
        for (ended, from) in ended["right"].iter().zip(init(right)) {
            assert_eq!(*ended, moved(moved(from, 1.0), 2.0));
        }
    }
}

/// Plain SGD keeps neither state nor counts, so the checkpoint does not name its parameters.
#[test]
fn a_parameter_of_an_optimizer_without_state_keeps_its_owner() {
    let spec = spec(&[("a", &[400]), ("b", &[300])]);
    let folder = tempfile::tempdir().expect("a folder");
    let update = |model: &mut ShardedModel, adamw: &mut AdamW, sgd: &mut Sgd, moved: bool| {
        let gradients = slopes::gradients(model, 1.0)?;
        let both: [Selected<'_>; 2] = match moved {
            false => [(adamw, &|it| it.name == "a"), (sgd, &|it| it.name != "a")],
            true => [(adamw, &|_| true), (sgd, &|_| false)],
        };
        model.update_by(gradients, both)
    };
    let optimizers = |model: &ShardedModel| {
        (AdamW::new(model, AdamWOptions::default()), Sgd::new(model, SgdOptions::default()))
    };
    for (number, place) in of_two().enumerate() {
        let folder = folder.path().join(number.to_string());
        let open =
            |model: &ShardedModel| open(model, &folder, Content::All, OtherParameters::Refuse);
        on_ranks(2, |world| {
            let mut model = model(world, &spec, place)?;
            let (mut adamw, mut sgd) = optimizers(&model);
            update(&mut model, &mut adamw, &mut sgd, false)?;
            open(&model)?.save(&model, &(adamw, sgd), &json!(7))
        });
        let error = common_error(outcomes(2, |world| {
            let mut model = model(world, &spec, place)?;
            let mut both = optimizers(&model);
            open(&model)?.load_latest(&mut model, &mut both)?.expect("there is one");
            update(&mut model, &mut both.0, &mut both.1, true).map(drop)
        }));
        let said = error.to_string();
        assert!(said.contains("parameter `b`: adamw has no state of it"), "{place:?}: {said}");
    }
}
