//! The memory of state and of the exchange of an update, and its bytes: measured as planned.

use hsdp::checkpoint::Checkpointed;
use hsdp::memory::{self, Category};
use hsdp::{
    ByteCount, Channel, Error, Flow, ModelOptions, Op, Plan, Rank, ShardedModel, StateOver,
};
use hsdp_sharding::PlanOptions;
use hsdp_tests::support::worlds::{mesh, on_ranks};

use crate::model::{Act, MESHES, Recipe, Steps, gradients, spec, with};

/// Bytes of state, the most of an exchange, and the calls and bytes from other ranks of an update:
/// all-to-alls and all-reduces.
pub(crate) type Numbers = (ByteCount, ByteCount, [Flow; 2]);

pub(crate) struct Measure;

impl Act<[Numbers; 2]> for Measure {
    fn act<O: Steps + Checkpointed>(
        self,
        mut model: ShardedModel,
        mut optimizers: O,
    ) -> Result<[Numbers; 2], Error> {
        let rank = model.rank();
        let mut moved = [Flow::NONE; 2];
        for step in 0..2 {
            let gradients = gradients(&mut model, step)?;
            let before = model.world().ledger();
            optimizers.apply(&mut model, gradients)?;
            let of_update = model.world().ledger().since(&before);
            moved = [Op::AllToAll, Op::AllReduce].map(|op| of_update.op(Channel::Reduce, op));
            assert_eq!(moved[0] + moved[1], of_update.channel(Channel::Reduce), "nothing else");
        }
        let plan = model.plan();
        let usage = |category| memory::usage(rank, category);
        let update = plan.update(rank);
        let measured = (usage(Category::Optimizer).live, usage(Category::Update).peak, moved);
        let moved = [update.exchanged, update.summed];
        Ok([measured, (plan.optimizer_state(rank), update.extra, moved)])
    }
}

#[test]
fn state_and_exchange_are_as_planned() {
    let _turn = crate::alone();
    for recipe in Recipe::ALL {
        for (sizes, state) in MESHES.into_iter().flat_map(|on| StateOver::ALL.map(|it| (on, it))) {
            memory::reset_peaks();
            let options = ModelOptions { state, ..ModelOptions::on(mesh(sizes[0], sizes[1])) };
            let ranks = options.mesh.world_size();
            let all = on_ranks(ranks, |world| with(world, options.clone(), recipe, Measure));
            for (rank, [mut measured, planned]) in all.into_iter().enumerate() {
                let what = format!("{recipe:?} on {sizes:?}, state over {state}, rank {rank}");
                if recipe == Recipe::Mixed {
                    // The plan does not know the order of the three exchanges.
                    assert!(measured.1 <= planned.1 && 2 * measured.1.get() > planned.1.get());
                    measured.1 = planned.1;
                }
                assert_eq!(measured, planned, "{what}");
            }
        }
    }
}

/// An update of Muon moves bytes, and takes memory: the comparison above is not one of zeros.
#[test]
fn muon_exchanges_matrices() {
    let plan = Plan::new(spec(Recipe::Muon), mesh(1, 4), PlanOptions::default()).expect("a plan");
    let moved: u64 = (0..4).map(|rank| plan.update(Rank::new(rank)).exchanged.bytes.get()).sum();
    let elements: usize = 40 * 24 + 8 * 27 + 3 * 16 * 8 + 16 * 64;
    assert!(moved > 4 * elements as u64, "{moved} bytes: most elements go there and come back");
    assert!(moved <= 2 * 4 * elements as u64);
    assert!(plan.memory().update.get() >= 4 * 40 * 24);
}

/// Compares Adafactor's sums with the plan: a value of each row, each column and each parameter,
/// and then of each parameter.
#[test]
fn adafactor_adds_up_sums() {
    let plan = Plan::new(spec(Recipe::Adafactor), mesh(1, 4), PlanOptions::default());
    let plan = plan.expect("a plan");
    let summed: u64 = (0..4).map(|rank| plan.update(Rank::new(rank)).summed.bytes.get()).sum();
    let rows_and_columns = (40 + 24) + 8 * 3 * (3 + 3) + 3 * (16 + 8) + (16 + 64);
    // Over four ranks together each value goes to its rank three times, and back three times.
    assert_eq!(summed, 8 * 6 * (rows_and_columns + 6 + 6));
}
