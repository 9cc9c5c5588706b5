//! The same bits on any mesh, for gradients whose sums are exact.

use crate::model::{MESHES, Recipe, is_matrix, run, run_in, spec};

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

/// Sums of tenths are rounded in another order on each mesh. AdamW, which updates the vectors,
/// makes steps of full length of a sum that is 0 but for rounding; Muon does not.
#[test]
fn sums_that_are_not_exact_change_the_last_bits_alone() {
    let _turn = crate::beside_others();
    let alone = run_in(0.1, Recipe::Muon, [1, 1]);
    for mesh in MESHES {
        let found = run_in(0.1, Recipe::Muon, mesh);
        for (step, (found, alone)) in found.iter().zip(&alone).enumerate() {
            let spec = spec(Recipe::Muon);
            let matrices = spec.params().filter(|(_, param)| is_matrix(param));
            for (name, values) in
                matrices.filter_map(|(_, it)| found.parameters.get_key_value(&it.name))
            {
                for (found, alone) in values.iter().zip(&alone.parameters[name]) {
                    let off = (found - alone).abs();
                    let what = format!("{mesh:?}, step {step}, {name}: {found}, not {alone}");
                    assert!(off <= 1e-6 * alone.abs().max(1.0), "{what}");
                }
            }
        }
    }
}
