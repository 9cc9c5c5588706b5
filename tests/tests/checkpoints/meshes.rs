//! A checkpoint has the same bytes whatever the mesh, and any mesh reads it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use hsdp::ModelOptions;
use hsdp_checkpoint::{Disk, Generation, Hash, Store};
use hsdp_tests::support::worlds::{mesh, on_ranks};

use super::training::Training;

const MESHES: [(usize, usize); 8] =
    [(1, 1), (2, 2), (1, 5), (5, 1), (3, 2), (2, 3), (1, 8), (4, 4)];

fn newest(root: &Path) -> Generation {
    Store::new(root, Arc::new(Disk)).latest().expect("intact").expect("there is one")
}

/// The hash of the bytes of each tensor, with its shape.
fn contents(generation: &Generation) -> BTreeMap<String, (Vec<u64>, Hash)> {
    let mut contents = BTreeMap::new();
    for (name, tensor) in &generation.manifest().tensors {
        let mut bytes = Vec::new();
        generation
            .for_each_chunk(name, |chunk| {
                bytes.extend_from_slice(chunk);
                Ok::<_, hsdp_checkpoint::Error>(())
            })
            .expect("intact");
        contents.insert(name.clone(), (tensor.shape.clone(), Hash::of(&bytes)));
    }
    contents
}

#[test]
fn what_any_mesh_loads_and_saves_again_is_the_same_bytes() {
    let folder = tempfile::tempdir().expect("a folder");
    let original = folder.path().join("original");
    let options = ModelOptions::on(mesh(2, 2));
    on_ranks(4, |world| {
        let mut training = Training::new(world, &options)?;
        training.train(3)?;
        training.save(&mut training.checkpoints(&original)?)
    });
    let expected = newest(&original);
    assert_eq!(expected.manifest().tensors.len(), 5 + 2 + 2 * 5);
    for (replicate, shard) in MESHES {
        let again = folder.path().join(format!("{replicate}x{shard}"));
        let options = ModelOptions::on(mesh(replicate, shard));
        on_ranks(options.mesh.world_size(), |world| {
            let mut training = Training::new(world, &options)?;
            training.load_latest(&original)?.expect("there is one");
            training.save(&mut training.checkpoints(&again)?)
        });
        let found = newest(&again);
        assert!(found.verify().is_empty(), "{replicate}x{shard}");
        assert_eq!(contents(&found), contents(&expected), "{replicate}x{shard}");
        let [found, expected] = [&found, &expected].map(Generation::manifest);
        assert_eq!(found.optimizer, expected.optimizer);
        assert_eq!((found.step, &found.user), (3, &expected.user));
        assert_eq!(found.files.len(), replicate * shard);
    }
}

#[test]
fn replicas_share_the_writing() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = ModelOptions::on(mesh(4, 1));
    on_ranks(4, |world| {
        let training = Training::new(world, &options)?;
        training.save(&mut training.checkpoints(folder.path())?)
    });
    let sizes: Vec<u64> =
        newest(folder.path()).manifest().files.iter().map(|it| it.bytes).collect();
    let [all, most] = [sizes.iter().sum(), *sizes.iter().max().expect("four")];
    // The last one's parts are padding to the half.
    assert!(3 * most < all, "{sizes:?}");
}
