//! The tensors that a GPT's forward keeps for its backward, as counted by the allocator.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use hsdp::memory::{self, Category, CountingAllocator};
use hsdp::{DType, Precision, Rank};
use hsdp_candle::Plain;
use hsdp_models::gpt::{Gpt, GptConfig, GptMemory, init};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// The bytes that are alive after a forward of some sequences, with the graph for the backward; and
/// those that the backward holds at most beside them.
fn held(gpt: &Gpt, batch: usize, dtype: DType) -> (u64, u64) {
    let spec = gpt.config().spec();
    let values: BTreeMap<String, Vec<f32>> =
        spec.params().map(|(_, param)| (param.name.clone(), init(param, 1))).collect();
    let plain = Plain::new(spec, &values, Precision::compute_in(dtype)).expect("a model");
    let tokens =
        Tensor::zeros((batch, gpt.config().context), candle_core::DType::U32, &Device::Cpu);
    let tokens = tokens.expect("tokens");
    // The matmul keeps its workspace from the first call on.
    drop(gpt.loss(&plain, &tokens, &tokens).and_then(|loss| loss.backward()).expect("a step"));
    let usage = || memory::usage(Rank::new(0), Category::Full);
    let before = usage().live;
    let _scope = memory::scope(Category::Full);
    let loss = gpt.loss(&plain, &tokens, &tokens).expect("a forward");
    let live = usage().live;
    memory::reset_peaks();
    drop(loss.backward().expect("a backward"));
    ((live - before).get(), (usage().peak - live).get())
}

/// Each config has another part as its largest. The gradients of parameters, which this twin of a
/// pass keeps, are no part of the formula.
#[test]
fn a_microbatch_holds_what_its_sizes_say() {
    // The allocations of other threads would have no category, and a thread that ends frees what
    // the matmul has kept, whenever that is.
    let alone = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool");
    for (config, batch) in [
        (GptConfig { vocab: 16, context: 16, width: 128, heads: 2, layers: 3 }, 16),
        (GptConfig { vocab: 16, context: 1024, width: 16, heads: 4, layers: 2 }, 1),
        (GptConfig { vocab: 4096, context: 32, width: 16, heads: 2, layers: 1 }, 4),
    ] {
        let gpt = Gpt::new(config).expect("sizes that fit");
        for dtype in [DType::F32, DType::BF16] {
            let GptMemory { activations, logits, gradients } =
                alone.install(|| gpt.kept(batch, dtype));
            let (forward, backward) = alone.install(|| held(&gpt, batch, dtype));
            let expected = activations + logits;
            let most = expected + expected / 10;
            let what = format!("{config:?} in {dtype}");
            assert!((expected..=most).contains(&forward), "{what}: {forward}, not {expected}");
            let elements: usize = config.spec().params().map(|(_, param)| param.numel()).sum();
            let most = match dtype {
                DType::F32 => gradients + gradients / 10 + (elements * size_of::<f32>()) as u64,
                _ => u64::MAX, // the matmul has operands of its own
            };
            assert!((gradients..=most).contains(&backward), "{what}: {backward}, not {gradients}");
        }
    }
}

#[test]
fn sizes_that_no_machine_has_do_not_wrap_around() {
    let most = GptConfig::MAX_SIZE;
    let layers = GptConfig::MAX_LAYERS;
    let config = GptConfig { vocab: most, context: most, width: most, heads: most, layers };
    let gpt = Gpt::new(config).expect("the largest sizes");
    let GptMemory { activations, logits, .. } = gpt.kept(most, DType::F32);
    assert_eq!([activations, logits], [u64::MAX; 2]);
    let error = Gpt::new(GptConfig { width: most + 1, ..config }).expect_err("too wide");
    assert_eq!(error.to_string(), "width is 16777217: the most is 16777216");
    let error = Gpt::new(GptConfig { layers: layers + 1, ..config }).expect_err("too deep");
    assert_eq!(error.to_string(), "layers is 10001: the most is 10000");
}
