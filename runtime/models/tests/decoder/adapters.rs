//! Adapters of each family: they alone are trained, as on whole parameters, and they are those of
//! PEFT.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{Device, Tensor};
use hsdp_models::decoder::{Decoder, Lora, Packing, Recomputation};

use crate::batches::{Batches, families};
use crate::run::{Recipe, Run, decoder};
use crate::stock::{Arithmetic, Stock};
use crate::variants::close;

const STEPS: usize = 2;
const LORA: Lora = Lora { rank: 3, alpha: 8.0 };

/// Names the two matrices of the adapter of a projection's weight.
fn adapter(weight: &str) -> [String; 2] {
    let projection = weight.strip_suffix(".weight").expect("a weight");
    ["A", "B"].map(|matrix| format!("{projection}.lora_{matrix}.weight"))
}

/// The weights of a model that have an adapter.
fn adapted(decoder: &Decoder) -> Vec<String> {
    let config = decoder.config();
    let projections = match config.packing {
        Packing::Separate => &["q_proj", "k_proj", "v_proj", "o_proj"][..],
        Packing::Packed => &["qkv_proj", "o_proj"],
    };
    let of_layer = |layer| {
        projections.iter().map(move |it| format!("model.layers.{layer}.self_attn.{it}.weight"))
    };
    (0..config.num_hidden_layers).flat_map(of_layer).collect()
}

#[test]
fn adapters_of_each_family_train_and_the_rest_is_frozen() {
    for (folder, mesh) in families().iter().zip(["1x4", "2x2"].into_iter().cycle()) {
        let model = folder.join("model");
        let batches = Batches::read(folder);
        let decoder = decoder(&model).with_lora(LORA);
        let want = Stock::read(&decoder, &model, Arithmetic::Decoder).train(&batches, STEPS);
        let run = |decoder| Run {
            decoder,
            model: model.clone(),
            mesh: mesh.parse().expect("a mesh"),
            microbatches: 1,
            steps: STEPS,
            recipe: Recipe::AdamW,
        };
        let got = run(decoder.clone()).numbers(&batches);
        close(&got, &want);
        let trained: Vec<_> = got.first.keys().cloned().collect();
        let mut adapters: Vec<_> = adapted(&decoder).iter().flat_map(|it| adapter(it)).collect();
        adapters.sort();
        assert_eq!(trained, adapters, "{}", folder.display());
        let [before, after] = got.held_out;
        assert!((before - after).abs() > 1e-4, "they are trained: {before} and {after}");
        let recomputed = run(decoder.recomputing(Recomputation::Blocks)).numbers(&batches);
        assert_eq!(recomputed, got, "{}", folder.display());
    }
}

/// PEFT trains `W + alpha / rank * B A` in place of `W`, so the gradients follow from that of the
/// merged weight.
#[test]
fn an_adapter_of_each_family_is_that_of_peft() {
    for folder in families() {
        check_peft(&folder);
    }
}

fn check_peft(folder: &Path) {
    let model = folder.join("model");
    let batches = Batches::read(folder);
    let [tokens, labels] = batches.held_out;
    let whole = decoder(&model);
    let mut merged = Stock::read(&whole, &model, Arithmetic::Decoder);
    let lora = whole.clone().with_lora(LORA);
    let mut adapters = Stock::read(&lora, &model, Arithmetic::Decoder);
    let scale = LORA.alpha / LORA.rank as f64;
    let shapes: BTreeMap<_, _> = lora
        .recorded()
        .expect("a model")
        .params()
        .map(|param| (param.name.clone(), param.shape.clone()))
        .collect();
    let matrix = |name: &str, values: &[f32]| {
        Tensor::from_slice(values, shapes[name].as_slice(), &Device::Cpu).expect("a matrix")
    };
    let values = |it: Tensor| it.flatten_all().and_then(|it| it.to_vec1::<f32>()).expect("f32");
    let mut matrices = BTreeMap::new();
    for weight in adapted(&whole) {
        let [a_name, b_name] = adapter(&weight);
        // B starts at 0, where A has no gradient.
        let b = adapters.values.get_mut(&b_name).expect("an adapter");
        b.iter_mut().enumerate().for_each(|(index, it)| *it = 0.1 * (index as f32).sin());
        let [a, b] = [a_name, b_name].map(|name| matrix(&name, &adapters.values[&name]));
        let whole = matrix(&weight, &merged.values[&weight]);
        let sum = b.matmul(&a).and_then(|product| whole + (product * scale)?);
        merged.values.insert(weight.clone(), values(sum.expect("a weight")));
        matrices.insert(weight, [a, b]);
    }
    let (want_loss, want) = merged.gradients(&tokens, &labels).expect("a backward");
    let (loss, got) = adapters.gradients(&tokens, &labels).expect("a backward");
    assert!((loss - want_loss).abs() <= 1e-6 * want_loss, "{loss}, not {want_loss}");
    assert_eq!(got.len(), 2 * matrices.len());
    for (weight, [a, b]) in matrices {
        let gradient = matrix(&weight, &want[&weight]);
        let of_a = b.t().and_then(|b| b.matmul(&gradient)? * scale).expect("a product");
        let of_b = a.t().and_then(|a| gradient.matmul(&a)? * scale).expect("a product");
        for (name, want) in adapter(&weight).into_iter().zip([of_a, of_b].map(values)) {
            let most = want.iter().fold(0.0_f32, |most, it| most.max(it.abs()));
            assert!(most > 0.0, "{name} has a gradient");
            for (got, want) in got[&name].iter().zip(&want) {
                assert!((got - want).abs() <= 1e-4 * most, "{name}: {got}, not {want}");
            }
        }
    }
}
