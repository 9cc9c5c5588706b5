"""Compares the logits of exports of all families with those of transformers.

    python3 -m pip install torch transformers safetensors
    golden=runtime/models/tests/golden_decoders
    for family in gemma2 llama mistral olmo2 phi3 qwen2 qwen3 smollm3; do
        cargo run --release --example finetune -- --model $golden/$family/model --mesh 2x2 \\
            --batches $golden/$family/batches.safetensors --export EXPORTS/$family/tuned
    done
    HSDP_EXPORTS=EXPORTS cargo test --release -p hsdp-models --test decoder -- --ignored logits_of_exports
    python3 runtime/models/tests/decoder/transformers_agree.py EXPORTS

EXPORTS is an absolute path. transformers reads each folder and computes the logits of the held-out sequences in f32, with
eager attention. It fails if one differs by more than 1e-5 of the largest.
"""

import pathlib
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

GOLDEN = pathlib.Path(__file__).parent.parent / "golden_decoders"
worst = 0.0
for export in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    model, report = AutoModelForCausalLM.from_pretrained(
        export / "tuned", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    tokens = load_file(GOLDEN / export.name / "batches.safetensors")["eval_input_ids"].long()
    with torch.no_grad():
        want = model.eval()(input_ids=tokens).logits
    got = load_file(export / "logits.safetensors")["logits"]
    difference = ((got - want).abs().max() / want.abs().max()).item()
    print(f"{export.name}: {got.numel()} logits up to {want.abs().max():.3f}, largest difference {difference:.1e} of that")
    worst = max(worst, difference)
sys.exit(worst > 1e-5)
