"""Makes the folders of `odd`: settings of families that the golden runs beside it do not have. Also
makes `defaults.json`: the configs that transformers reads from a few keys of each family.

    python3 -m pip install torch==2.15.0 transformers==5.24.0 safetensors
    python3 runtime/models/tests/golden_decoders/generate.py            # compares
    python3 runtime/models/tests/golden_decoders/generate.py --write    # makes the folders anew

The runs and their comparison are those of ../golden_llama/generate.py.
"""

import json
import pathlib
import shutil
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "golden_llama"))
from generate import compare, run  # noqa: E402

STEPS, SEQUENCES, LENGTH, VOCABULARY = 6, 8, 24, 48
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None,
}

# By folder: the settings of the model, keys that config.json then lacks, and changes of its other keys.
MADE = {
    "llama_biases": ({"model_type": "llama", "attention_bias": True, "mlp_bias": True}, [], {}),
    "llama3_in_parts": (
        {
            "model_type": "llama",
            "dtype": "bfloat16",
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
                "high_freq_factor": 2.0, "original_max_position_embeddings": 8,
            },
        },
        [],
        {},
    ),
    # The old place of both keys.
    "phi3_half": (
        {"model_type": "phi3", "hidden_size": 32, "sliding_window": 6, "pad_token_id": 5},
        ["rope_parameters"],
        {"partial_rotary_factor": 0.5, "rope_theta": 300.0},
    ),
    # 3 of 6 elements: transformers rotates 4.
    "phi3_odd_part": (
        {"model_type": "phi3", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        [],
        {},
    ),
    "qwen2_windows": (
        {
            "model_type": "qwen2", "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 5,
            "max_window_layers": 1, "tie_word_embeddings": False, "head_dim": 8,
        },
        ["layer_types"],
        {},
    ),
    "qwen3_biases": (
        {
            "model_type": "qwen3", "hidden_size": 20, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8,
            "attention_bias": True, "use_sliding_window": True, "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": False,
        },
        [],
        {},
    ),
    "gemma2_untied": (
        {
            "model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 20, "sliding_window": 5, "num_hidden_layers": 3,
            "attn_logit_softcapping": 2.0, "final_logit_softcapping": None, "tie_word_embeddings": False, "attention_bias": True,
        },
        ["layer_types"],
        {},
    ),
    "gemma2_tight_cap": (
        {
            "model_type": "gemma2", "head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": None, "pad_token_id": 5,
            "final_logit_softcapping": 1.5, "layer_types": ["full_attention", "sliding_attention"],
        },
        [],
        {},
    ),
    "mistral_in_parts": ({"model_type": "mistral", "dtype": "bfloat16", "sliding_window": None}, ["head_dim"], {}),
    "mistral_linear": (
        {
            "model_type": "mistral", "head_dim": 10, "sliding_window": 3, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
        },
        [],
        {},
    ),
    "olmo2_tied": ({"model_type": "olmo2", "attention_bias": True, "tie_word_embeddings": True, "dtype": "bfloat16"}, [], {}),
    "smollm3_windows": (
        {
            "model_type": "smollm3", "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 5,
            "no_rope_layer_interval": 2, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False,
        },
        ["layer_types", "no_rope_layers"],
        {},
    ),
}


def make(folder, settings, absent, changes):
    """Writes the model and its batches."""
    torch.manual_seed(7)
    settings = SIZES | {"initializer_range": 0.1} | settings
    dtype = settings.pop("dtype", "float32")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter += 0.2 * torch.randn_like(parameter)
    shutil.rmtree(folder, ignore_errors=True)
    in_parts = {"max_shard_size": "8KB"} if dtype == "bfloat16" else {}
    model.to(getattr(torch, dtype)).save_pretrained(folder / "model", **in_parts)
    (folder / "model" / "generation_config.json").unlink()
    path = folder / "model" / "config.json"
    config = json.loads(path.read_text()) | changes
    config = {key: value for key, value in config.items() if key not in absent}
    path.write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")

    def sequences(*shape):
        tokens = torch.randint(VOCABULARY, (*shape, LENGTH + 1), dtype=torch.int64)
        tokens[..., 3:6] = 5
        labels = tokens[..., 1:].clone()
        lengths = torch.randint(3, LENGTH + 1, (*shape, 1))
        labels[torch.arange(LENGTH).expand_as(labels) >= lengths] = -100
        return tokens[..., :-1].to(torch.uint32).contiguous(), labels.contiguous()

    ids, labels = sequences(STEPS, SEQUENCES)
    eval_ids, eval_labels = sequences(SEQUENCES)
    batches = {"input_ids": ids, "labels": labels, "eval_input_ids": eval_ids, "eval_labels": eval_labels}
    save_file(batches, folder / "batches.safetensors")


def defaults():
    """Returns the configs that transformers reads from a few keys of each family."""
    families = sorted(folder.parent.name for folder in HERE.glob("*/model"))
    stated = [{"model_type": family} for family in families]
    stated += [keys | {"use_sliding_window": True} for keys in stated if "max_window_layers" in read(keys)]
    return [{"stated": keys, "read": read(keys)} for keys in stated]


def read(stated):
    config = AutoConfig.for_model(**stated).to_dict()
    return {key: config[key] for key in sorted(config) if key not in ("transformers_version", "id2label", "label2id")}


if __name__ == "__main__":
    # One line for each model.
    lines = "[\n" + ",\n".join(json.dumps(model) for model in defaults()) + "\n]\n"
    if "--write" in sys.argv:
        (HERE / "defaults.json").write_text(lines)
        for name, settings in MADE.items():
            make(HERE / "odd" / name, *settings)
            (HERE / "odd" / name / "expected.json").write_text(json.dumps(run(HERE / "odd" / name), indent=1) + "\n")
    if (HERE / "defaults.json").read_text() != lines:
        sys.exit("defaults.json differs from the configs of transformers")
    sys.exit(compare(HERE / "odd"))
