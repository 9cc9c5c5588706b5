//! The tensors that a GPT's forward keeps for its backward, as counted by the allocator.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use hsdp::memory::{self, Category, CountingAllocator};
use hsdp::{DType, Precision, Rank};
use hsdp_candle::Plain;
use hsdp_candle::gpt::{Gpt, GptConfig, Kept, init};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// The bytes that are alive after a forward of some sequences, with the graph for the backward.
fn held(gpt: &Gpt, batch: usize) -> u64 {
    let spec = gpt.config().spec();
    let values: BTreeMap<String, Vec<f32>> =
        spec.params().map(|(_, param)| (param.name.clone(), init(param, 1))).collect();
    let plain = Plain::new(spec, &values, Precision::default()).expect("a model");
    let tokens =
        Tensor::zeros((batch, gpt.config().context), candle_core::DType::U32, &Device::Cpu);
    let tokens = tokens.expect("tokens");
    // The matmul keeps its workspace from the first call on.
    drop(gpt.loss(&plain, &tokens, &tokens).expect("a forward"));
    let before = memory::usage(Rank::new(0), Category::Full).live;
    let _scope = memory::scope(Category::Full);
    let loss = gpt.loss(&plain, &tokens, &tokens).expect("a forward");
    let live = memory::usage(Rank::new(0), Category::Full).live - before;
    drop(loss);
    live.get()
}

/// Each config has another part as its largest.
#[test]
fn a_forward_keeps_what_its_sizes_say() {
    for (config, batch) in [
        (GptConfig { vocab: 16, context: 16, width: 128, heads: 2, layers: 3 }, 4),
        (GptConfig { vocab: 16, context: 128, width: 16, heads: 4, layers: 2 }, 2),
        (GptConfig { vocab: 4096, context: 32, width: 16, heads: 2, layers: 1 }, 4),
    ] {
        let gpt = Gpt::new(config).expect("sizes that fit");
        let Kept { activations, scores, mask, logits, .. } = gpt.kept(batch, DType::F32);
        let (expected, held) = (activations + scores + mask + logits, held(&gpt, batch));
        let most = expected + expected / 10;
        assert!((expected..=most).contains(&held), "{config:?}: {held}, expected {expected}");
    }
}

#[test]
fn sizes_that_no_machine_has_do_not_wrap_around() {
    let most = GptConfig::MAX_SIZE;
    let layers = GptConfig::MAX_LAYERS;
    let config = GptConfig { vocab: most, context: most, width: most, heads: most, layers };
    let gpt = Gpt::new(config).expect("the largest sizes");
    let Kept { activations, scores, logits, .. } = gpt.kept(most, DType::F32);
    assert_eq!([activations, scores, logits], [u64::MAX; 3]);
    let error = Gpt::new(GptConfig { width: most + 1, ..config }).expect_err("too wide");
    assert_eq!(error.to_string(), "width is 16777217: the most is 16777216");
    let error = Gpt::new(GptConfig { layers: layers + 1, ..config }).expect_err("too deep");
    assert_eq!(error.to_string(), "layers is 10001: the most is 10000");
}
