use hsdp_sharding::{DType, Param, State, Unit, UnitId};
use proptest::prelude::*;

use super::*;
use crate::{Machine, Time};

const FIRST: UnitId = UnitId::new(0);
/// Tokens of [`batch`].
const TOKENS: f64 = 4.0 * 64.0;

fn batch() -> Batch {
    Batch { sequences: 4, context: 64, dtype: DType::F16, recompute: Recompute::Nothing }
}

/// A card with round numbers: an aligned product at 100 Tflop/s, others at 25, 1 TB/s, 3 us a
/// kernel, 5 us a launch.
fn machine() -> Machine {
    let numbers = [
        ("compute.f16", 200e12),
        ("compute.efficiency", 0.5),
        ("compute.unaligned", 0.125),
        ("compute.half", 1e9),
        ("compute.kernel", 3e-6),
        ("compute.launch", 5e-6),
        ("memory.bandwidth", 2e12),
        ("memory.efficiency", 0.5),
    ];
    with("a100-node", &numbers)
}

fn with(name: &str, numbers: &[(&str, f64)]) -> Machine {
    let mut machine = Machine::bundled(name).expect("bundled");
    for (name, value) in numbers {
        machine.set(name, *value, "a test").expect("possible");
    }
    machine
}

fn card() -> Processor {
    Processor::new(&machine(), DType::F16, 1).expect("a processor")
}

/// Returns the bytes that a unit's forward keeps.
fn kept_by(computation: &Computation, unit: UnitId, batch: &Batch) -> u64 {
    bytes(kept_bytes(&computation.units[unit.index()], batch)).get()
}

fn matrix(name: &str, dims: [usize; 2]) -> ModelSpec {
    ModelSpec::new().unit(Unit::new("unit").param(Param::new(name, dims)))
}

fn of(model: &ModelSpec) -> Computation {
    let attention = |unit: &Unit| {
        let attention = AttentionShape { heads: 8, size: 16, scores: AttentionScores::Stored };
        unit.params.iter().any(is_attention).then_some(attention)
    };
    Computation::of(model, &Hints { lookup: &is_lookup, attention: &attention }).expect("a model")
}

fn near(time: Time, seconds: f64) {
    assert!((time.seconds() - seconds).abs() < 1e-11, "{} s, expected {seconds}", time.seconds());
}

const fn gpt() -> GptShape {
    GptShape { width: 1024, heads: 16, layers: 4, context: 1024, vocabulary: 50_257 }
}

#[test]
fn a_product_takes_its_operations_and_three_kernels_around_it() {
    let cost = of(&matrix("w", [512, 1024])).forward(FIRST, &batch(), &card());
    let operations = 2.0 * TOKENS * 512.0 * 1024.0;
    let bytes = 2.0 * 0.5 * TOKENS * (512.0 + 1024.0);
    near(cost.device, (operations + 1e9) / 100e12 + bytes / 1e12 + 4.0 * 3e-6);
    near(cost.host, 4.0 * 5e-6);
}

#[test]
fn the_matrix_of_few_tokens_takes_the_time_of_its_bytes() {
    let batch = Batch { sequences: 1, context: 8, ..batch() };
    let cost = of(&matrix("w", [65_536, 4096])).forward(FIRST, &batch, &card());
    let [m, n, k] = [8.0, 65_536.0, 4096.0];
    let bytes = 2.0 * (n * k + m * k + m * n) + 2.0 * 0.5 * m * (n + k);
    near(cost.device, bytes / 1e12 + 4.0 * 3e-6);
}

/// Seconds of a forward and a backward of a unit with one matrix.
fn both_ways(dims: [usize; 2], batch: &Batch) -> f64 {
    let computation = of(&matrix("w", dims));
    let [forward, backward] = [Computation::forward, Computation::backward]
        .map(|phase| phase(&computation, FIRST, batch, &card()).device.seconds());
    forward + backward
}

#[test]
fn rows_that_are_no_multiple_of_16_bytes_are_slow() {
    for [even, odd] in [[[32_768, 4096], [32_769, 4096]], [[4096, 32_768], [4096, 32_769]]] {
        let [even, odd] = [even, odd].map(|dims| both_ways(dims, &batch()));
        assert!(odd > 3.0 * even, "{odd} {even}");
    }
}

/// Forward, gradient of the inputs and gradient of the matrix: each has tokens as the number of
/// rows of a matrix, and never as a stride.
#[test]
fn an_odd_number_of_tokens_costs_its_operations_only() {
    let batch = Batch { sequences: 7, context: 2047, ..batch() };
    let tokens = 7.0 * 2047.0;
    let products = 3.0 * (2.0 * tokens * 1024.0 * 4096.0 + 1e9) / 100e12;
    let around = 3.0 * 2.0 * 0.5 * tokens * (1024.0 + 4096.0) / 1e12;
    let gradient = 2.0 * 1024.0 * 4096.0 / 1e12;
    let kernels = (3.0 + 9.0 + 2.0) * 3e-6;
    let found = both_ways([1024, 4096], &batch);
    let expected = products + around + gradient + kernels;
    assert!((found - expected).abs() < 1e-11, "{found} {expected}");
}

/// A row of scores in memory has one for each token; a fused attention has none in memory.
#[test]
fn rows_of_stored_scores_have_a_stride() {
    let time = |scores, context| {
        let attention = move |_: &Unit| Some(AttentionShape { heads: 8, size: 128, scores });
        let hints = Hints { lookup: &is_lookup, attention: &attention };
        let model = ModelSpec::new().unit(Unit::new("unit").param(Param::new("norm", [16])));
        let computation = Computation::of(&model, &hints).expect("a model");
        let batch = Batch { sequences: 1024, context, ..batch() };
        computation.forward(FIRST, &batch, &card()).device
    };
    assert!(time(AttentionScores::Stored, 2047) > time(AttentionScores::Stored, 2048));
    assert!(time(AttentionScores::Fused, 2047) < time(AttentionScores::Fused, 2048));
}

/// A token of a sliding window has scores with a part of the tokens before it.
#[test]
fn a_window_has_the_scores_of_its_tokens() {
    let model = ModelSpec::new().unit(Unit::new("unit").param(Param::new("norm", [16])));
    let flops = |scores, context| {
        let attention = move |_: &Unit| Some(AttentionShape { heads: 8, size: 128, scores });
        let hints = Hints { lookup: &is_lookup, attention: &attention };
        let computation = Computation::of(&model, &hints).expect("a model");
        let batch = Batch { sequences: 3, context, ..batch() };
        let time = computation.forward(FIRST, &batch, &card()).device;
        (computation.flops(&batch) / (12.0 * 3.0 * 8.0 * 128.0), time)
    };
    // A window of four of 32 tokens: four for each token, but 3 + 2 + 1 of these lie before the
    // first one. A token and itself count as half a pair.
    assert_eq!(flops(AttentionScores::Window(4), 32).0, 32.0 * 4.0 - 6.0 - 4.0 / 2.0);
    for context in [1, 64, 4096] {
        assert_eq!(
            flops(AttentionScores::Window(4096), context),
            flops(AttentionScores::Fused, context)
        );
    }
    assert!(flops(AttentionScores::Window(4096), 8192).1 < flops(AttentionScores::Fused, 8192).1);
}

/// A fit to steps without unaligned products leaves their number as it was, maybe above the other.
#[test]
fn unaligned_products_are_never_faster() {
    let numbers = [("compute.efficiency", 0.2), ("compute.unaligned", 0.9)];
    let on = Processor::new(&with("a100-node", &numbers), DType::F16, 1).expect("a processor");
    let time = |rows| of(&matrix("w", [rows, 4096])).forward(FIRST, &batch(), &on).device;
    assert!(time(4095) < time(4096) && time(4096) < time(4097));
}

#[test]
fn a_backward_has_two_products_where_a_matrix_is_trained() {
    let param = Param::new("w", [512, 1024]);
    let frozen = ModelSpec::new().unit(Unit::new("unit").param(param.clone().frozen()));
    let trained = ModelSpec::new().unit(Unit::new("unit").param(param));
    let [frozen, trained] =
        [frozen, trained].map(|model| of(&model).backward(FIRST, &batch(), &card()).device);
    let product = (2.0 * TOKENS * 512.0 * 1024.0 + 1e9) / 100e12 + 3e-6;
    let gradient = 2.0 * 512.0 * 1024.0 / 1e12 + 2.0 * 3e-6;
    near(trained, frozen.seconds() + product + gradient);
    let around = 2.0 * TOKENS * 1536.0 / 1e12 + 6.0 * 3e-6;
    near(frozen, product + around);
}

#[test]
fn a_backward_computes_again_what_it_is_told_to() {
    let computation = gpt().computation().expect("a GPT");
    let backward =
        |recompute| computation.backward(UnitId::new(1), &Batch { recompute, ..batch() }, &card());
    let forward = computation.forward(UnitId::new(1), &batch(), &card());
    let [nothing, attention, unit] =
        [Recompute::Nothing, Recompute::Attention, Recompute::Unit].map(backward);
    near(unit.device, nothing.device.seconds() + forward.device.seconds());
    near(unit.host, nothing.host.seconds() + forward.host.seconds());
    // Two products and four kernels over scores, of 4 sequences, 16 heads and 64 x 64 pairs.
    let scores = 4.0 * 16.0 * 64.0 * 64.0;
    let products = 2.0 * ((2.0 * scores * 64.0 + 1e9) / 100e12 + 3e-6);
    let again = products + 2.0 * 4.0 * scores / 1e12 + 4.0 * 3e-6;
    near(attention.device, nothing.device.seconds() + again);
}

#[test]
fn a_lookup_takes_the_time_of_its_rows() {
    let forward = |rows| of(&matrix("wte", [rows, 1024])).forward(FIRST, &batch(), &card());
    assert_eq!(forward(1000), forward(100_000));
    near(forward(1000).device, 2.0 * 2.0 * TOKENS * 1024.0 / 1e12 + 3e-6);
}

#[test]
fn a_tied_head_is_a_product_after_the_last_unit() {
    let untied = matrix("wte", [4096, 1024]);
    let [with, without] = [of(&untied.clone().tie("head", "wte")), of(&untied)];
    let loss = |it: &Computation| it.loss(&batch(), &card()).device.seconds();
    let backward = |it: &Computation| it.backward(FIRST, &batch(), &card()).device.seconds();
    let product = (2.0 * TOKENS * 4096.0 * 1024.0 + 1e9) / 100e12 + 3e-6;
    let classes = 60.0 * TOKENS * 4096.0 / 1e12;
    let kernels = 12.0 * 3e-6;
    assert!((loss(&with) - product - classes - kernels).abs() < 1e-11);
    assert!((loss(&without) - kernels).abs() < 1e-11, "no product, no classes");
    let gradient = 2.0 * 4096.0 * 1024.0 / 1e12 + 2.0 * 3e-6;
    assert!((backward(&with) - backward(&without) - 2.0 * product - gradient).abs() < 1e-11);
}

/// Without losses of time, a step of a large model takes six operations by parameter and token, and
/// those of attention.
#[test]
fn operations_are_six_by_parameter_and_token() {
    let ideal = [
        ("compute.f16", 1e12),
        ("compute.efficiency", 1.0),
        ("compute.unaligned", 1.0),
        ("compute.half", 1.0),
        ("compute.kernel", 0.0),
        ("compute.launch", 0.0),
        ("memory.bandwidth", 1e18),
    ];
    let on = Processor::new(&with("a100-node", &ideal), DType::F16, 1).expect("a processor");
    let computation = gpt().computation().expect("a GPT");
    let spec = gpt().spec();
    let batch = Batch { sequences: 1, context: 1024, ..batch() };
    let units = spec.unit_ids().map(|unit| {
        [computation.forward(unit, &batch, &on), computation.backward(unit, &batch, &on)]
    });
    let times = units.flatten().chain([computation.loss(&batch, &on)]).map(|it| it.device);
    let all = times.fold(Time::ZERO, |sum, time| sum + time);
    let operations = all.seconds() * 1e12;
    let attention = 4.0 * 12.0 * 1024.0 * 1024.0 * 1024.0;
    let expected = 6.0 * 1024.0 * spec.numel().0 as f64 + attention;
    assert!((operations / expected - 1.0).abs() < 0.01, "{operations} {expected}");
}

#[test]
fn on_a_host_the_thread_does_everything_and_ranks_share_cores_and_memory() {
    let machine = Machine::bundled("two-core-cpu").expect("bundled");
    let forward = |ranks| {
        let on = Processor::new(&machine, DType::F32, ranks).expect("a processor");
        of(&matrix("w", [512, 1024])).forward(FIRST, &Batch { dtype: DType::F32, ..batch() }, &on)
    };
    let [one, two, four] = [1, 2, 4].map(forward);
    assert_eq!(one.device, Time::ZERO);
    assert!(one.host <= two.host && two.host < four.host, "{one:?} {two:?} {four:?}");
}

#[test]
fn fused_scores_do_not_pass_memory() {
    let model = matrix("attn.qkv", [3 * 128, 128]);
    let kept = |scores, context| {
        let attention = move |_: &Unit| Some(AttentionShape { heads: 8, size: 16, scores });
        let hints = Hints { lookup: &is_lookup, attention: &attention };
        let computation = Computation::of(&model, &hints).expect("a model");
        kept_by(&computation, FIRST, &Batch { context, ..batch() })
    };
    assert_eq!(kept(AttentionScores::Fused, 128), 2 * kept(AttentionScores::Fused, 64));
    let stored = |context: u64| 5 * 4 * 8 * context * context;
    assert_eq!(kept(AttentionScores::Stored, 128) - kept(AttentionScores::Fused, 128), stored(128));
}

/// Korthikanti et al. (2022): 34 bytes by token and width, and 5 by score; with selective
/// recomputation, only the former.
#[test]
fn a_block_keeps_what_the_published_formula_says() {
    let computation = gpt().computation().expect("a GPT");
    let tokens = 2.0 * 1024.0;
    let width = 1024.0;
    let heads = 16.0;
    let kept = |recompute| {
        let batch = Batch { sequences: 2, context: 1024, recompute, ..batch() };
        kept_by(&computation, UnitId::new(1), &batch) as f64
    };
    let [linear, scores] = [34.0 * tokens * width, 5.0 * heads * tokens * 1024.0];
    let near = |found: f64, expected: f64| {
        assert!((found / expected - 1.0).abs() < 0.1, "{found} {expected}");
    };
    near(kept(Recompute::Nothing), linear + scores);
    near(kept(Recompute::Attention), linear);
    near(kept(Recompute::Unit), 2.0 * tokens * width);
}

/// An adapter of rank 8 comes before the projection that it adapts.
#[test]
fn a_unit_that_is_computed_again_keeps_its_input() {
    let unit = Unit::new("unit")
        .param(Param::new("lora_A", [8, 1024]))
        .param(Param::new("lora_B", [512, 8]))
        .param(Param::new("q_proj", [512, 1024]))
        .param(Param::new("gate_proj", [4096, 1024]));
    let computation = of(&ModelSpec::new().unit(unit));
    let batch = Batch { recompute: Recompute::Unit, ..batch() };
    assert_eq!(kept_by(&computation, FIRST, &batch) as f64, 2.0 * 1024.0 * TOKENS);
}

#[test]
fn the_most_is_kept_when_the_loss_is_computed_or_a_unit_again() {
    let computation = gpt().computation().expect("a GPT");
    let batch = Batch { sequences: 1, context: 1024, recompute: Recompute::Unit, ..batch() };
    let kept: u64 = gpt().spec().unit_ids().map(|it| kept_by(&computation, it, &batch)).sum();
    let results = 10 * 1024 * 50_257;
    assert_eq!(computation.most_kept(&batch).get(), kept + results);
}

#[test]
fn an_update_reads_and_writes_gradient_master_state_and_copy() {
    let bytes = |state| update_bytes(state, DType::F16);
    assert_eq!(bytes(State::Elements(2)), 4.0 + 8.0 + 16.0 + 2.0);
    assert_eq!(bytes(State::Elements(0)), 14.0);
    assert_eq!(bytes(State::EightBit { block: 16 }), 14.0 + 4.0 + 1.0);
    let copied_is_master = update_bytes(State::Elements(2), DType::F32);
    assert_eq!(copied_is_master, 4.0 + 8.0 + 16.0);
}

/// Compares a GPT whose units compute in f32, in a batch of f16, with a batch of f32; and one with
/// a single unit of f32 with both.
#[test]
fn a_unit_computes_at_the_speed_and_with_the_bytes_of_its_own_dtype() {
    let spec = gpt().spec();
    let computing = |unit_is_chosen: &dyn Fn(&Unit) -> bool| {
        let units = spec.units().iter().cloned();
        let unit = |unit: Unit| {
            if unit_is_chosen(&unit) { unit.compute_in(DType::F32) } else { unit }
        };
        let island = units.map(unit).fold(ModelSpec::new(), ModelSpec::unit);
        of(&spec.ties().fold(island, |spec, (alias, target)| spec.tie(alias, target)))
    };
    let narrow = batch();
    let wide = Batch { dtype: DType::F32, ..batch() };
    let on = card();
    let plain = of(&spec);
    let all = computing(&|_| true);
    for unit in spec.unit_ids() {
        assert_eq!(all.forward(unit, &narrow, &on), plain.forward(unit, &wide, &on));
        assert_eq!(all.backward(unit, &narrow, &on), plain.backward(unit, &wide, &on));
        assert_eq!(kept_by(&all, unit, &narrow), kept_by(&plain, unit, &wide));
    }
    // The block, not the norm at the end, whose forward has no kernel of its own.
    let block = UnitId::new(1);
    assert_ne!(all.forward(block, &narrow, &on), plain.forward(block, &narrow, &on));
    assert_eq!(all.loss(&narrow, &on), plain.loss(&wide, &on));
    assert_eq!(all.most_kept(&narrow), plain.most_kept(&wide));
    let one = computing(&|unit| unit.name == "blocks.0");
    let first = UnitId::new(1);
    assert_eq!(one.forward(first, &narrow, &on), plain.forward(first, &wide, &on));
    let second = UnitId::new(2);
    assert_eq!(one.forward(second, &narrow, &on), plain.forward(second, &narrow, &on));
    let more = kept_by(&plain, first, &wide) - kept_by(&plain, first, &narrow);
    assert_eq!(one.most_kept(&narrow).get(), plain.most_kept(&narrow).get() + more);
}

#[test]
fn impossible_models_are_refused() {
    let uneven = GptShape { heads: 3, ..gpt() }.computation().expect_err("refused");
    assert_eq!(uneven.to_string(), "3 heads do not divide the width, 1024");
    let none =
        |_: &Unit| Some(AttentionShape { heads: 0, size: 64, scores: AttentionScores::Stored });
    let hints = Hints { lookup: &is_lookup, attention: &none };
    let error = Computation::of(&matrix("w", [8, 8]), &hints).expect_err("refused");
    assert_eq!(error.to_string(), "unit `unit` has an attention of 0 heads of size 64");
    let none =
        |_: &Unit| Some(AttentionShape { heads: 8, size: 64, scores: AttentionScores::Window(0) });
    let hints = Hints { lookup: &is_lookup, attention: &none };
    let error = Computation::of(&matrix("w", [8, 8]), &hints).expect_err("refused");
    assert_eq!(error.to_string(), "unit `unit` has an attention with a window of 0 tokens");
    let error = Processor::new(&machine(), DType::I64, 1).expect_err("refused");
    assert_eq!(error.to_string(), "no training computes in i64: expected f32, bf16 or f16");
}

proptest! {
    /// No number overflows, and more work never takes less time.
    #[test]
    fn more_tokens_take_more_time(
        dims in [1usize..1 << 20, 1..1 << 20],
        sequences in 1usize..usize::MAX / 2,
        eighths in 1usize..usize::MAX / 8,
    ) {
        let computation = of(&matrix("attn.w", dims));
        // Rows of stored scores are aligned in both.
        let few = Batch { sequences, context: 8 * eighths, ..batch() };
        let many = Batch { sequences: 2 * sequences, ..few };
        let time = |it: &Batch| computation.backward(FIRST, it, &card()).device;
        prop_assert!(time(&few) <= time(&many));
        prop_assert!(computation.most_kept(&few) <= computation.most_kept(&many));
    }
}
