"""Writes golden.safetensors: PyTorch's values and gradients, with which golden.rs compares the layers of `hsdp_models::nn`.

    pip install torch safetensors
    python golden.py

The committed file is of torch 2.15.0 on an x86-64 CPU. For each layer and each dtype of f32, bf16 and f16 it has

    LAYER.DTYPE.in.NAME     the inputs, in the dtype
    LAYER.DTYPE.in.g        the gradient of the output, in the dtype (cross_entropy: the output is the sum, and its gradient 0.5)
    LAYER.DTYPE.out         the output
    LAYER.DTYPE.grad.NAME   the gradient of an input

The last two are f32 and computed by PyTorch in f32 from these inputs: for bf16 and f16 they are the truth before it is rounded.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
ROWS, WIDTH = 5, 23
EPS = 1e-5
CAP = 1.5


def rotate_half(x):
    """As transformers' models/llama/modeling_llama.py has it."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rope(x, cos, sin):
    """`apply_rotary_pos_emb` of transformers; its tables have each angle twice, once for either half. Heads come after positions."""
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


def rope_interleaved(x, cos, sin):
    """As models/gptj/modeling_gptj.py: `rotate_every_two`, and tables that repeat each angle."""
    rotated = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos.repeat_interleave(2, -1).unsqueeze(1) + rotated * sin.repeat_interleave(2, -1).unsqueeze(1)


def is_visible(queries, keys, window):
    """As `sliding_window_overlay` and `causal_mask_function` of transformers' masking_utils.py."""
    place = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)[None]
    return (key <= place) & (key > place - window)


def softmax_of_scores(x, window, cap=None):
    """As `eager_attention_forward` of transformers' models/gemma2/modeling_gemma2.py.

    A window as long as the keys is a causal mask.
    """
    x = x * 0.25
    if cap is not None:
        x = soft_cap(x, cap)
    return F.softmax(x.masked_fill(~is_visible(*x.shape[-2:], window), float("-inf")), dim=-1)


def soft_cap(x, cap):
    return torch.tanh(x / cap) * cap


def cross_entropy(logits):
    return F.cross_entropy(logits, LABELS, ignore_index=-100, reduction="sum")


def attention(q, k, v):
    """Positions come before heads, and each key-value head serves the same number of heads."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25, enable_gqa=True).transpose(1, 2)


def attention_window(q, k, v, window=3):
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    mask = is_visible(q.shape[2], k.shape[2], window)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.25, enable_gqa=True)
    return mixed.transpose(1, 2)


def attention_capped(q, k, v, window=None):
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return (softmax_of_scores(q @ k.mT, window or k.shape[2], CAP) @ v).transpose(1, 2)


def rope_partial(x, cos, sin):
    """As models/phi3/modeling_phi3.py: the rest of a head passes through."""
    return torch.cat((rope(x[..., :8], cos, sin), x[..., 8:]), dim=-1)


def rope_interleaved_partial(x, cos, sin):
    """As models/gptj/modeling_gptj.py with `rotary_dim`."""
    return torch.cat((rope_interleaved(x[..., :8], cos, sin), x[..., 8:]), dim=-1)


def attention_packed(x):
    return attention(*x.unbind(2))


def normal(*shape, scale=1.0):
    return torch.randn(shape) * scale


def angles():
    frequencies = 10000.0 ** (-torch.arange(4) / 4)
    return torch.outer(torch.arange(7).float(), frequencies)


torch.manual_seed(1)
LABELS = torch.tensor([3, -100, 0, WIDTH - 1, 11])
X = {"x": normal(ROWS, WIDTH, scale=2.0) + 0.5}
WEIGHT = {"weight": 1 + normal(WIDTH, scale=0.3)}
GATED = {"gate": normal(ROWS, WIDTH, scale=3.0), "up": normal(ROWS, WIDTH)}
ROTATED = {"x": normal(2, 5, 3, 8)}
LAYERS = {
    "rms_norm": (lambda x, weight: F.rms_norm(x, [WIDTH], weight, EPS), X | WEIGHT),
    "layer_norm": (
        lambda x, weight, bias: F.layer_norm(x, [WIDTH], weight, bias, EPS),
        X | WEIGHT | {"bias": normal(WIDTH)},
    ),
    "linear": (F.linear, {"x": normal(ROWS, WIDTH), "weight": normal(7, WIDTH), "bias": normal(7)}),
    "linear_alone": (F.linear, {"x": normal(ROWS, WIDTH), "weight": normal(7, WIDTH)}),
    "attention": (attention, {"q": normal(2, 5, 4, 8), "k": normal(2, 5, 2, 8), "v": normal(2, 5, 2, 8)}),
    "attention_packed": (attention_packed, {"x": normal(2, 5, 3, 2, 8)}),
    "softmax": (lambda x: F.softmax(x, dim=-1), X),
    "softmax_causal": (lambda x: softmax_of_scores(x, 7), {"x": normal(3, 7, 7, scale=4.0)}),
    "cross_entropy": (cross_entropy, {"logits": normal(ROWS, WIDTH, scale=4.0)}),
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), X),
    "silu_mul": (lambda gate, up: F.silu(gate) * up, GATED),
    "gelu_mul": (lambda gate, up: F.gelu(gate, approximate="tanh") * up, GATED),
    "rope": (rope, ROTATED),
    "rope_interleaved": (rope_interleaved, ROTATED),
    "attention_window": (
        attention_window,
        {"q": normal(2, 7, 4, 8), "k": normal(2, 9, 2, 8), "v": normal(2, 9, 2, 8)},
    ),
    "attention_capped": (
        attention_capped,
        {"q": 2 * normal(2, 5, 4, 8), "k": 2 * normal(2, 6, 2, 8), "v": normal(2, 6, 2, 8)},
    ),
    "attention_packed_capped_window": (
        lambda x: attention_capped(*x.unbind(2), window=2),
        {"x": normal(2, 7, 3, 2, 8, scale=2.0)},
    ),
    "softmax_window": (lambda x: softmax_of_scores(x, 3), {"x": normal(3, 7, 9, scale=4.0)}),
    "softmax_capped_window": (
        lambda x: softmax_of_scores(x, 2, CAP),
        {"x": normal(3, 7, 9, scale=8.0)},
    ),
    "soft_cap": (lambda x: soft_cap(x, CAP), X),
    "rope_partial": (rope_partial, {"x": normal(2, 5, 3, 13)}),
    "rope_interleaved_partial": (rope_interleaved_partial, {"x": normal(2, 5, 3, 13)}),
}


def case(layer, inputs, tables, dtype):
    given = {name: value.to(dtype) for name, value in (inputs | tables).items()}
    wide = {name: value.float().clone().requires_grad_(name in inputs) for name, value in given.items()}
    out = layer(*wide.values())
    g = normal(*out.shape).to(dtype) if out.dim() else torch.tensor(0.5)
    out.backward(g.float())
    case = {f"in.{name}": value for name, value in given.items()} | {"in.g": g, "out": out.detach()}
    return case | {f"grad.{name}": wide[name].grad for name in inputs}


def main():
    tensors = {}
    for name, (layer, inputs) in LAYERS.items():
        tables = {"cos": angles().cos(), "sin": angles().sin()} if name.startswith("rope") else {}
        for dtype, torch_dtype in DTYPES.items():
            if tables:  # x is shorter than the tables
                short = lambda x, cos, sin, layer=layer: layer(x, cos[: x.shape[1]], sin[: x.shape[1]])
                values = case(short, inputs, tables, torch_dtype)
            else:
                values = case(layer, inputs, tables, torch_dtype)
            tensors |= {f"{name}.{dtype}.{key}": value.contiguous().clone() for key, value in values.items()}
    tensors["labels"] = LABELS
    save_file(tensors, Path(__file__).parent / "golden.safetensors", {"torch": torch.__version__})


main()
