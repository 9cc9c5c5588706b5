//! Matrices of one shape, which their owner orthogonalizes together.

use hsdp::checkpoint::Checkpointed;
use hsdp::memory::{self, Category};
use hsdp::{
    Error, ModelOptions, ModelSpec, Muon, MuonOptions, Optimizer, Param, Rank, ShardedModel, State,
    StateOver, Unit,
};
use hsdp_kernels::{MatrixDType, NewtonSchulz};
use hsdp_sharding::{Mesh, Plan, PlanOptions};
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common, mesh, on_ranks};

use crate::model::{Act, MESHES, Steps, Tensors, gradients, muon};
use crate::planned::Measure;

/// Nine matrices of one shape in two units, and a larger one.
fn spec() -> ModelSpec {
    let weight = |name: &str| Param::new(name, [24, 16]);
    let stack = Param::new("second.stack", [5, 24, 16]).matrices(5, 24, 16);
    let first = Unit::new("first")
        .param(weight("first.a"))
        .param(Param::new("first.large", [32, 40]))
        .param(weight("first.b"))
        .param(weight("first.c"));
    let second = Unit::new("second").param(stack).param(weight("second.d"));
    ModelSpec::new().unit(first).unit(second).updated_by(|_| State::Muon)
}

#[test]
fn bundles_take_the_memory_that_is_planned() {
    let _turn = crate::alone();
    for (sizes, state) in MESHES.into_iter().flat_map(|on| StateOver::ALL.map(|it| (on, it))) {
        memory::reset_peaks();
        let options = ModelOptions { state, ..ModelOptions::on(mesh(sizes[0], sizes[1])) };
        let all = on_ranks(options.mesh.world_size(), |world| {
            let model = ShardedModel::new(world, spec(), options.clone(), springs::initial)?;
            let muon = Muon::new(&model, muon());
            Measure.act(model, muon)
        });
        for (rank, [measured, planned]) in all.into_iter().enumerate() {
            assert_eq!(measured, planned, "{sizes:?}, state over {state}, rank {rank}");
        }
    }
}

/// The comparison above is one of bundles: on one rank they need more than the largest matrix.
#[test]
fn a_bundle_needs_more_than_the_largest_matrix() {
    let plan = Plan::new(spec(), Mesh::SINGLE, PlanOptions::default()).expect("a plan");
    let all = 9 * 24 * 16 + 32 * 40;
    let largest = 32 * 40 + 32 * (32 + 40);
    let bundle = 9 * (24 * 16 + 16 * (16 + 24));
    assert!(bundle > largest);
    assert_eq!(plan.memory().update.get(), 4 * (all + bundle));
}

/// Three wide matrices of 2^21 elements belong to the rank that has not the expensive one, and two of
/// them are computed at once: three would need more than the elements that the rank sends.
#[test]
fn a_bundle_of_large_matrices_ends_at_the_limit() {
    let _turn = crate::alone();
    memory::reset_peaks();
    let wide = |name: &str| Param::new(name, [4, 1 << 19]);
    let unit = Unit::new("all")
        .param(wide("all.a"))
        .param(wide("all.b"))
        .param(wide("all.c"))
        .param(Param::new("all.expensive", [512, 512]));
    let spec = ModelSpec::new().unit(unit).updated_by(|_| State::Muon);
    let all = on_ranks(2, |world| {
        let mut model = springs::model_of(world, &spec, &ModelOptions::on(mesh(1, 2)))?;
        let mut muon = Muon::new(&model, muon());
        let gradients = springs::gradients(&mut model, 1)?;
        muon.step(&mut model, gradients)?;
        let measured = memory::usage(model.rank(), Category::Update).peak;
        Ok((measured, model.plan().update(model.rank()).extra))
    });
    for (rank, (measured, planned)) in all.into_iter().enumerate() {
        assert_eq!(measured, planned, "rank {rank}");
    }
    let plan = Plan::new(spec, mesh(1, 2), PlanOptions::default()).expect("a plan");
    let wide = (1 << 21) + 4 * (4 + 256);
    assert_eq!(plan.update(Rank::new(1)).extra.get(), 4 * (3 * (1 << 21) + 2 * wide));
}

/// Three steps, and the parameters after them.
struct Train;

impl Act<Tensors> for Train {
    fn act<O: Steps + Checkpointed>(
        self,
        mut model: ShardedModel,
        mut optimizers: O,
    ) -> Result<Tensors, Error> {
        for step in 0..3 {
            let gradients = gradients(&mut model, step)?;
            optimizers.apply(&mut model, gradients)?;
        }
        model.full_parameters()
    }
}

/// Trains with these iterations, and with others for some of the parameters.
fn trained(sizes: [usize; 2], own: NewtonSchulz, others: Option<NewtonSchulz>) -> Tensors {
    let mesh = mesh(sizes[0], sizes[1]);
    common(on_ranks(mesh.world_size(), |world| {
        let options = ModelOptions::on(mesh);
        let model = ShardedModel::new(world, spec(), options, springs::initial)?;
        let mut both = Muon::new(&model, MuonOptions { newton_schulz: own, ..muon() });
        if let Some(newton_schulz) = others {
            both = both.group(is_other, |it| MuonOptions { newton_schulz, ..it });
        }
        Train.act(model, both)
    }))
}

/// Whether a parameter has iterations of its own: some of one shape have, in turn.
fn is_other(param: &Param) -> bool {
    ["first.b", "second.d"].contains(&&*param.name)
}

/// A matrix is never orthogonalized as others in its bundle would be: by more steps, or in another
/// dtype.
#[test]
fn matrices_of_one_shape_have_the_iterations_of_their_group() {
    let _turn = crate::beside_others();
    let own = NewtonSchulz::default();
    for other in
        [NewtonSchulz { steps: 2, ..own }, NewtonSchulz { dtype: MatrixDType::BF16, ..own }]
    {
        let [all, none] = [own, other].map(|by| trained([1, 1], by, None));
        for sizes in [[1, 1], [1, 2], [2, 2]] {
            for (name, values) in trained(sizes, own, Some(other)) {
                let is_other = is_other(&Param::new(name.as_str(), [1]));
                let expected = if is_other { &none } else { &all };
                assert!(values == expected[&name], "{name} on {sizes:?}, {other:?}");
                assert!(all[&name] != none[&name], "{name}: iterations differ");
            }
        }
    }
}
