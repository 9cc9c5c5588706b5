//! Logits of folders that the example exported, for `transformers_agree.py`.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{Device, Tensor, safetensors};
use hsdp_candle::Plain;
use hsdp_models::decoder::{Decoder, DecoderConfig, Lora, Pretrained};

use crate::batches::{Batches, families};

/// Writes `logits.safetensors` beside the two exports of each family in the folder of
/// `HSDP_EXPORTS`: of the whole model, and of adapters.
#[test]
#[ignore = "needs HSDP_EXPORTS, a folder of exports: see transformers_agree.py"]
fn logits_of_exports() {
    let exports = std::env::var("HSDP_EXPORTS").expect("HSDP_EXPORTS, a folder of exports");
    for family in families() {
        let exports = Path::new(&exports).join(family.file_name().expect("a name"));
        let [tokens, _] = Batches::read(&family).held_out;
        for kind in ["whole", "adapters"] {
            let export = exports.join(kind);
            let logits = HashMap::from([("logits", logits(&export.join("tuned"), &tokens))]);
            safetensors::save(&logits, export.join("logits.safetensors")).expect("written");
        }
    }
}

/// Computes the logits of the model in an export, with its adapters if it has some.
fn logits(folder: &Path, tokens: &Tensor) -> Tensor {
    let text = std::fs::read_to_string(folder.join("config.json")).expect("a file");
    let decoder = Decoder::new(DecoderConfig::from_json(&text).expect("a model"));
    let read = |file: &str| safetensors::load(folder.join(file), &Device::Cpu).expect("tensors");
    let mut tensors = read("model.safetensors");
    let decoder = match folder.join("adapters.safetensors").exists() {
        true => {
            let adapters = read("adapters.safetensors");
            let (_, a) = adapters.iter().find(|(name, _)| name.contains("lora_A")).expect("one");
            let rank = a.dim(0).expect("a matrix");
            tensors.extend(adapters);
            decoder.with_lora(Lora::of_rank(rank))
        }
        false => {
            let pretrained = Pretrained::open(folder).expect("an export");
            assert!(pretrained.warnings().is_empty(), "{:?}", pretrained.warnings());
            decoder
        }
    };
    let values: BTreeMap<_, _> = tensors
        .into_iter()
        .map(|(name, it)| (name, it.flatten_all().and_then(|it| it.to_vec1()).expect("f32")))
        .collect();
    let spec = decoder.spec().expect("a model");
    let plain = Plain::new(spec, &values, hsdp::Precision::default()).expect("all values");
    decoder.logits(&plain, tokens).expect("a forward")
}
