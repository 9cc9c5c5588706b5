//! Logits of folders that the example exported, for `transformers_agree.py`.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{Device, safetensors};
use hsdp_candle::Plain;
use hsdp_models::decoder::{Decoder, Pretrained};

use crate::batches::{Batches, families};

/// Writes `logits.safetensors` beside each export of a family, in the folder of `HSDP_EXPORTS`.
#[test]
#[ignore = "needs HSDP_EXPORTS, a folder of exports: see transformers_agree.py"]
fn logits_of_exports() {
    let exports = std::env::var("HSDP_EXPORTS").expect("HSDP_EXPORTS, a folder of exports");
    for family in families() {
        let export = Path::new(&exports).join(family.file_name().expect("a name"));
        let pretrained = Pretrained::open(&export.join("tuned")).expect("an export");
        assert!(pretrained.warnings().is_empty(), "{:?}", pretrained.warnings());
        let decoder = Decoder::new(pretrained.config().clone());
        let tensors = safetensors::load(export.join("tuned/model.safetensors"), &Device::Cpu);
        let values: BTreeMap<_, _> = tensors
            .expect("tensors")
            .into_iter()
            .map(|(name, it)| (name, it.flatten_all().and_then(|it| it.to_vec1()).expect("f32")))
            .collect();
        let spec = decoder.spec().expect("a model");
        let plain = Plain::new(spec, &values, hsdp::Precision::default()).expect("all values");
        let [tokens, _] = Batches::read(&family).held_out;
        let logits = decoder.logits(&plain, &tokens).expect("a forward");
        let logits = HashMap::from([("logits", logits)]);
        safetensors::save(&logits, export.join("logits.safetensors")).expect("written");
    }
}
