"""Compares what `finetune --export` wrote with the run that wrote it, by transformers.

    python3 -m pip install torch transformers peft safetensors
    cargo run --release --example finetune -- --model MODEL --batches FILE.safetensors --out RUN --export TUNED
    python3 runtime/models/tests/programs/finetune/transformers_agree.py TUNED FILE.safetensors RUN

transformers reads the folder TUNED, and PEFT its folder `peft` if there is one, and computes the mean loss of the
held-out sequences in f32; the run has it in RUN/summary.json as `eval_loss_after`. It fails if they differ by more than
1e-5 of their value.
"""

import json
import pathlib
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

tuned, batches, run = map(pathlib.Path, sys.argv[1:])
model, report = AutoModelForCausalLM.from_pretrained(tuned, dtype=torch.float32, output_loading_info=True)
assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
if (tuned / "peft").exists():
    import peft

    model = peft.PeftModel.from_pretrained(model, tuned / "peft").eval()
held_out = load_file(batches)
if "eval_input_ids" not in held_out:
    sys.exit(f"{batches} has no sequences that are held out: eval_input_ids and eval_labels")
tokens, labels = held_out["eval_input_ids"].long(), held_out["eval_labels"]
with torch.no_grad():
    logits = model(input_ids=tokens).logits
loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).item()
ours = json.loads((run / "summary.json").read_text())["eval_loss_after"]
difference = abs(loss - ours) / loss
print(f"transformers {loss:.7f}, finetune {ours:.7f}, relative difference {difference:.1e}")
sys.exit(difference > 1e-5)
