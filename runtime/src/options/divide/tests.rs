//! The five invariants of averages and divide factors, as far as they depend on the plan alone.

use super::*;

const WIRES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

fn parties(wire: DType, shard: usize, replicate: usize, objective: Objective) -> Parties {
    Parties {
        wire,
        shard_members: shard,
        replicate_members: Some(replicate),
        microbatches_in_contribution: 1,
        microbatches_in_partial: 1,
        objective,
    }
}

#[test]
fn a_partial_has_one_scale_whether_an_all_reduce_follows_or_not() {
    for wire in WIRES {
        for (replicate, shard) in [(2, 8), (3, 2), (4, 8), (2, 16), (1, 4), (5, 7)] {
            for objective in [Objective::RankMean, Objective::Sum, Objective::WeightedMean] {
                let follows = DividePlan::of(parties(wire, shard, replicate, objective));
                let alone = DividePlan::of(Parties {
                    replicate_members: None,
                    ..parties(wire, shard, replicate, objective)
                });
                assert_eq!(
                    follows.reduce_scatter, alone.reduce_scatter,
                    "{wire} {replicate}x{shard}"
                );
                assert_eq!(alone.all_reduce, None);
            }
        }
    }
}

#[test]
fn the_pre_divide_of_the_last_microbatch_comes_from_the_shard_group_alone() {
    // The subtle bug: from all 16 ranks of a 2x8 mesh on the last microbatch, from 8 before it.
    let last = DividePlan::of(parties(DType::F16, 8, 2, Objective::RankMean));
    assert_eq!(last.reduce_scatter, Divides { pre: 4.0, post: 2.0 });
    assert_eq!(last.all_reduce, Some(Divides { pre: 2.0, post: 1.0 }));
}

#[test]
fn the_product_of_all_divides_is_the_objectives_divisor() {
    for wire in WIRES {
        for replicate in 1..=9 {
            for shard in 1..=9 {
                for microbatches in [1, 3, 8, 300] {
                    let rank_mean = Parties {
                        microbatches_in_partial: microbatches,
                        ..parties(wire, shard, replicate, Objective::RankMean)
                    };
                    assert_eq!(product(rank_mean), as_f64(replicate * shard), "{rank_mean:?}");
                    let sum = Parties { objective: Objective::Sum, ..rank_mean };
                    assert_eq!(product(sum), 1.0, "{sum:?}");
                }
            }
        }
    }
}

fn product(parties: Parties) -> f64 {
    let plan = DividePlan::of(parties);
    plan.reduce_scatter.product() * plan.all_reduce.map_or(1.0, Divides::product)
}

#[test]
fn pre_divides_are_powers_of_two() {
    for shard in 1..=40 {
        for microbatches in 1..=9 {
            let plan = DividePlan::of(Parties {
                microbatches_in_contribution: microbatches,
                microbatches_in_partial: microbatches,
                ..parties(DType::F16, shard, 3, Objective::Sum)
            });
            for pre in [Some(plan.reduce_scatter.pre), plan.all_reduce.map(|divides| divides.pre)] {
                let pre = pre.expect("both collectives take place");
                assert_eq!(pre.log2().fract(), 0.0, "{shard} members: {pre}");
            }
        }
    }
}

#[test]
fn only_f16_divides_beforehand() {
    for wire in [DType::F32, DType::BF16] {
        let plan = DividePlan::of(parties(wire, 8, 4, Objective::RankMean));
        assert_eq!(plan.reduce_scatter, Divides { pre: 1.0, post: 8.0 });
        assert_eq!(plan.all_reduce, Some(Divides { pre: 1.0, post: 4.0 }));
    }
}

#[test]
fn an_axis_of_size_one_divides_nothing() {
    let plan = DividePlan::of(parties(DType::F16, 1, 1, Objective::RankMean));
    assert_eq!(plan, DividePlan { reduce_scatter: Divides::NONE, all_reduce: None });
    // FSDP2's double division: shard size 1, a custom factor and f16 divided by the factor twice.
    let factor = DividePlan::of(parties(DType::F16, 1, 4, Objective::Factor(8.0)));
    assert_eq!(factor.reduce_scatter, Divides::NONE);
    assert_eq!(factor.all_reduce.map(Divides::product), Some(1.0));
    assert_eq!(final_divisor(Objective::Factor(8.0), 0, 0, 1.0), 8.0);
}

#[test]
fn the_all_reduce_makes_room_for_the_microbatches() {
    // 8000 a microbatch, 8 of them, 2x2: the mean 64000 is representable, the sum over replicas is
    // not.
    let plan = DividePlan::of(Parties {
        microbatches_in_partial: 8,
        ..parties(DType::F16, 2, 2, Objective::RankMean)
    });
    let all_reduce = plan.all_reduce.expect("two replicas");
    assert!(64000.0 / all_reduce.pre <= 65504.0 / 2.0, "even a sum in f16 has room");
}

#[test]
fn what_enters_an_all_reduce_fits_f16_if_a_gradient_does() {
    for (shard, replicate) in [(1, 2), (3, 2), (3, 5), (7, 3)] {
        for microbatches in 1..=20 {
            for (objective, mean_over_shards) in
                [(Objective::RankMean, true), (Objective::Sum, false)]
            {
                let plan = DividePlan::of(Parties {
                    microbatches_in_partial: microbatches,
                    ..parties(DType::F16, shard, replicate, objective)
                });
                let summands = microbatches * if mean_over_shards { 1 } else { shard };
                let pre = plan.all_reduce.expect("replicas").pre;
                assert!(
                    as_f64(summands) / pre <= 1.0,
                    "{replicate}x{shard}, {microbatches}: {pre}"
                );
            }
        }
    }
}

#[test]
fn the_end_takes_out_what_the_seed_put_in() {
    let weight = 1000;
    let exponent = 7;
    let scale = 1024.0;
    let seed_of_weight_ten = 10.0 * f64::powi(2.0, -exponent) * scale;
    let gradient_of_mean = 3.0;
    let sum = seed_of_weight_ten * gradient_of_mean * 100.0; // a hundred such contributions
    assert_eq!(sum / final_divisor(Objective::WeightedMean, weight, exponent, scale), 3.0);
    assert_eq!(final_divisor(Objective::RankMean, weight, 0, scale), scale);
    assert_eq!(sum / final_divisor(Objective::Sum, weight, exponent, scale), 3000.0);
    assert_eq!(sum / final_divisor(Objective::Factor(4.0), weight, exponent, scale), 750.0);
}
