"""Makes the folders `pad`, `pad_tied` and `pad_last`, and repeats the runs of all folders that have an `expected.json`.

    python3 -m pip install torch==2.15.0 transformers==5.24.0 safetensors
    python3 runtime/models/tests/golden_llama/generate.py            # compares
    python3 runtime/models/tests/golden_llama/generate.py --write    # makes the folders anew

Without `--write` it fails if a loss or a norm differs from that in `expected.json` by more than 2e-6 of its value.
"""

import json
import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

HERE = pathlib.Path(__file__).parent
STEPS, SEQUENCES, LENGTH, VOCABULARY = 6, 8, 24, 48

# The fields of config.json in which the folders differ. Token 5 is in all sequences.
MADE = {
    "pad": {"pad_token_id": 5, "tie_word_embeddings": False},
    "pad_tied": {"pad_token_id": 5, "tie_word_embeddings": True},
    # PyTorch counts a negative row from the end: this is token 47.
    "pad_last": {"pad_token_id": -1, "tie_word_embeddings": False},
}


def make(name, changes):
    """Writes the model and its batches."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1,
        tie_word_embeddings=changes["tie_word_embeddings"],
    )
    model = LlamaForCausalLM(config)
    folder = HERE / name
    model.save_pretrained(folder / "model")
    (folder / "model" / "generation_config.json").unlink()
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=1, sort_keys=True) + "\n")

    def sequences(*shape):
        tokens = torch.randint(VOCABULARY, (*shape, LENGTH + 1), dtype=torch.int64)
        tokens[..., -4:] = VOCABULARY - 1
        tokens[..., 3:6] = 5
        labels = tokens[..., 1:].clone()
        labels[..., ::7] = -100
        return tokens[..., :-1].to(torch.uint32).contiguous(), labels.contiguous()

    ids, labels = sequences(STEPS, SEQUENCES)
    eval_ids, eval_labels = sequences(SEQUENCES)
    batches = {"input_ids": ids, "labels": labels, "eval_input_ids": eval_ids, "eval_labels": eval_labels}
    save_file(batches, folder / "batches.safetensors")


def run(folder):
    """Trains unsharded, on the CPU in f32."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="eager")
    model.train()
    batches = load_file(folder / "batches.safetensors")
    matrices = [it for it in model.parameters() if it.ndim >= 2]
    rest = [it for it in model.parameters() if it.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), eps=1e-8)

    def loss(ids, labels):
        logits = model(input_ids=ids.long()).logits.flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100)

    def evaluate():
        with torch.no_grad():
            return loss(batches["eval_input_ids"], batches["eval_labels"]).item()

    result = {"before": evaluate(), "losses": [], "norms": [], "parameters": []}
    result["parameters"] = [name for name, _ in model.named_parameters()]
    for ids, labels in zip(batches["input_ids"], batches["labels"]):
        value = loss(ids, labels)
        optimizer.zero_grad()
        value.backward()
        result["losses"].append(value.item())
        result["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    return result | {"after": evaluate()}


def differs(got, want):
    """The largest relative difference of two runs."""
    numbers = lambda it: [it["before"], *it["losses"], *it["norms"], it["after"]]
    assert got["parameters"] == want["parameters"], got["parameters"]
    return max(abs(one - other) / abs(other) for one, other in zip(numbers(got), numbers(want), strict=True))


def compare(folders):
    """Repeats the runs of all folders, and returns whether one differs."""
    worst = 0.0
    for expected in sorted(folders.glob("*/expected.json")):
        difference = differs(run(expected.parent), json.loads(expected.read_text()))
        print(f"{expected.parent.name}: {difference:.1e}")
        worst = max(worst, difference)
    return worst > 2e-6


if __name__ == "__main__":
    if "--write" in sys.argv:
        for name, changes in MADE.items():
            make(name, changes)
            (HERE / name / "expected.json").write_text(json.dumps(run(HERE / name), indent=1) + "\n")
    sys.exit(compare(HERE))
