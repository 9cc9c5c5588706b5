"""The GPT of `train_gpt` in PyTorch, for the peers `gpt.py` and `plain.py`.

The sizes and the arithmetic are those of `train_gpt`: pre-norm blocks, GELU in its tanh form, no
tied weights. Its vocabulary is that of the text; here it has 96 characters.
"""
import torch, torch.nn as nn, torch.nn.functional as F


def add_options(parser, batch):
    """Adds the options of the model and of the steps. `batch` is the default of sequences."""
    sizes = dict(layers=3, width=96, heads=4, context=64, vocab=96)
    for name, default in dict(microbatches=2, batch=batch, **sizes, steps=30).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sdpa", action="store_true", help="PyTorch's fused attention")


class Block(nn.Module):
    def __init__(self, options):
        super().__init__()
        w = options.width
        self.heads, self.sdpa = options.heads, options.sdpa
        self.ln_1, self.ln_2 = nn.LayerNorm(w), nn.LayerNorm(w)
        self.qkv, self.proj = nn.Linear(w, 3 * w), nn.Linear(w, w)
        self.fc, self.out = nn.Linear(w, 4 * w), nn.Linear(4 * w, w)

    def forward(self, x):
        b, t, w = x.shape
        qkv = self.qkv(self.ln_1(x)).view(b, t, 3, self.heads, w // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if self.sdpa:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            s = q @ k.transpose(-1, -2) / (w // self.heads) ** 0.5
            mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
            y = s.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Returns the loss of `ids` against `targets`, computed in f32."""

    def __init__(self, options):
        super().__init__()
        w = options.width
        self.wte, self.wpe = nn.Embedding(options.vocab, w), nn.Embedding(options.context, w)
        self.h = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.ln_f, self.head = nn.LayerNorm(w), nn.Linear(w, options.vocab, bias=False)

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.head(self.ln_f(x)).flatten(0, 1).float(), targets.flatten())
