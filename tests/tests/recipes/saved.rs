//! Checkpoints: the state that is loaded on another mesh is the one that was saved, bit for bit.

use std::collections::BTreeMap;
use std::path::Path;

use hsdp::checkpoint::{CheckpointOptions, Checkpointed, Checkpoints};
use hsdp::{Error, ModelOptions, ShardedModel, StateOver};
use hsdp_checkpoint::{Disk, Generation, Store};
use hsdp_tests::support::worlds::{common, mesh, on_ranks};
use serde_json::json;

use crate::model::{Act, MESHES, Recipe, STEPS, Steps, Tensors, gradients, run, with};

/// Loads the newest checkpoint of a folder, if there is one, trains to a step, and saves into
/// another folder.
#[derive(Clone, Copy)]
struct Go<'a> {
    from: &'a Path,
    until: usize,
    into: &'a Path,
}

impl Act<Tensors> for Go<'_> {
    fn act<O: Steps + Checkpointed>(
        self,
        mut model: ShardedModel,
        mut optimizers: O,
    ) -> Result<Tensors, Error> {
        let mut checkpoints = Checkpoints::open(&model, self.from, CheckpointOptions::default())?;
        checkpoints.load_latest(&mut model, &mut optimizers)?;
        let begin = usize::try_from(model.committed_steps()).expect("a few");
        for step in begin..self.until {
            let gradients = gradients(&mut model, step)?.clip(40.0);
            optimizers.apply(&mut model, gradients)?;
        }
        drop(checkpoints);
        let mut checkpoints = Checkpoints::open(&model, self.into, CheckpointOptions::default())?;
        checkpoints.save(&model, &optimizers, &json!(null))?;
        model.full_parameters()
    }
}

fn go(recipe: Recipe, sizes: [usize; 2], state: StateOver, go: Go<'_>) -> Tensors {
    let options = ModelOptions { state, ..ModelOptions::on(mesh(sizes[0], sizes[1])) };
    let ranks = options.mesh.world_size();
    common(on_ranks(ranks, |world| with(world, options.clone(), recipe, go)))
}

/// All tensors of the newest checkpoint.
fn tensors(folder: &Path) -> BTreeMap<String, Vec<u32>> {
    let store = Store::new(folder, std::sync::Arc::new(Disk));
    let generation: Generation = store.latest().expect("readable").expect("there is one");
    let tensors = &generation.manifest().tensors;
    let read = |name: &String| {
        let numel = tensors[name].numel().expect("a number");
        let mut values = vec![0.0_f32; usize::try_from(numel).expect("it fits")];
        generation.read(name, 0, &mut values).expect("it is intact");
        (name.clone(), values.into_iter().map(f32::to_bits).collect())
    };
    tensors.keys().map(read).collect()
}

/// The state after two steps is the same on each mesh, and whether replicas divide it; loaded on
/// another mesh and saved there, it has the same bits; and a run that goes on from it ends as one
/// that was not interrupted.
#[test]
fn what_is_saved_on_one_mesh_is_loaded_on_another() {
    let _turn = crate::beside_others();
    for recipe in Recipe::ALL {
        let uninterrupted = run(recipe, [1, 1]).pop().expect("steps").parameters;
        let mut states = Vec::new();
        for (at, first) in MESHES.into_iter().enumerate() {
            let second = MESHES[(at + 2) % MESHES.len()];
            let [own, other] = match at % 2 {
                0 => [StateOver::World, StateOver::Shards],
                _ => [StateOver::Shards, StateOver::World],
            };
            let [empty, saved, again, ended] =
                [(); 4].map(|()| tempfile::tempdir().expect("a folder"));
            go(recipe, first, own, Go { from: empty.path(), until: 2, into: saved.path() });
            go(recipe, second, other, Go { from: saved.path(), until: 2, into: again.path() });
            states.extend([tensors(saved.path()), tensors(again.path())]);
            let last = Go { from: again.path(), until: STEPS, into: ended.path() };
            assert!(
                go(recipe, first, own, last) == uninterrupted,
                "{recipe:?} from {first:?} to {second:?}"
            );
        }
        assert!(states.iter().all(|state| *state == states[0]), "{recipe:?}");
        assert!(states[0].len() > 7, "{recipe:?} has state");
    }
}
