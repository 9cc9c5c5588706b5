//! The same bits on any mesh, for gradients whose sums are exact.

use crate::model::{MESHES, Recipe, run};

#[test]
fn the_bits_do_not_depend_on_the_mesh() {
    let _turn = crate::beside_others();
    for recipe in Recipe::ALL {
        let alone = run(recipe, [1, 1]);
        for mesh in MESHES {
            assert!(run(recipe, mesh) == alone, "{recipe:?} on {mesh:?}");
        }
    }
}
