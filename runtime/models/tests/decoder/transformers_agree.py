"""Compares exports of all families, trained whole and by adapters, with transformers and PEFT.

    python3 -m pip install torch transformers peft safetensors
    golden=runtime/models/tests/golden_decoders
    for family in gemma2 llama mistral olmo2 phi3 qwen2 qwen3 smollm3; do
        for kind in whole adapters; do
            lora=; [ $kind = whole ] || lora="--lora 8 --lr 0.05"
            cargo run --release --example finetune -- --model $golden/$family/model --mesh 2x2 --steps 2 $lora \\
                --batches $golden/$family/batches.safetensors --out EXPORTS/$family/$kind/run \\
                --export EXPORTS/$family/$kind/tuned
        done
    done
    HSDP_EXPORTS=EXPORTS cargo test --release -p hsdp-models --test decoder -- --ignored logits_of_exports
    python3 runtime/models/tests/decoder/transformers_agree.py EXPORTS

EXPORTS is an absolute path. transformers, and PEFT for adapters, read each folder and compute the logits and the mean
loss of the held-out sequences in f32, with eager attention. It prints a table of the loss of the last step, the loss
of the held-out sequences before and after the run and by transformers, and the largest difference of a logit, in
parts of the largest logit. It fails if that is above 1e-5, or the two losses differ by more than 1e-5 of their value.
"""

import json
import pathlib
import sys

import peft
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

GOLDEN = pathlib.Path(__file__).parent.parent / "golden_decoders"


def read(tuned):
    """Returns the model of a folder, with its adapters if there are some, which must all be used."""
    model, report = AutoModelForCausalLM.from_pretrained(
        tuned, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    if (tuned / "peft").exists():
        model = peft.PeftModel.from_pretrained(model, tuned / "peft")
        stored = load_file(tuned / "peft" / "adapter_model.safetensors")
        loaded = peft.get_peft_model_state_dict(model)
        assert stored.keys() == loaded.keys(), stored.keys() ^ loaded.keys()
        assert all(torch.equal(stored[name], loaded[name]) for name in stored)
    return model.eval()


worst = 0.0
print("| family | trained | loss, last step | held out before | after | by transformers | logits differ by |")
print("|---|---|---|---|---|---|---|")
for family in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    for kind in ("whole", "adapters"):
        export = family / kind
        held_out = load_file(GOLDEN / family.name / "batches.safetensors")
        tokens, labels = held_out["eval_input_ids"].long(), held_out["eval_labels"]
        with torch.no_grad():
            model = read(export / "tuned")
            want = model(input_ids=tokens).logits
            if kind == "adapters":
                with model.disable_adapter():
                    base = model(input_ids=tokens).logits
                assert (want - base).abs().max() > 0.01 * want.abs().max(), "adapters count"
        loss = torch.nn.functional.cross_entropy(want.flatten(0, 1), labels.flatten(), ignore_index=-100).item()
        got = load_file(export / "logits.safetensors")["logits"]
        difference = ((got - want).abs().max() / want.abs().max()).item()
        run = json.loads((export / "run" / "summary.json").read_text())
        before, after = run["eval_loss_before"], run["eval_loss_after"]
        worst = max(worst, difference, abs(after - loss) / loss)
        print(
            f"| {family.name} | {kind} | {run['loss']['last']:.6f} | {before:.6f} | {after:.6f} | {loss:.6f} "
            f"| {difference:.1e} |"
        )
sys.exit(worst > 1e-5)
