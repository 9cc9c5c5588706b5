"""A whole training step of the example's GPT by PyTorch FSDP2 (HSDP), over gloo on the CPU or over NCCL on a GPU: the peer of `train_gpt`.

    OMP_NUM_THREADS=1 V/bin/torchrun --nproc_per_node 4 gpt.py --mesh 2x2 --microbatches 2 --steps 30
    torchrun --nproc_per_node 1 gpt.py --device cuda --mesh 1x1 --sdpa

The sizes and the arithmetic are those of `train_gpt` (f32, pre-norm blocks, GELU in its tanh form, no tied weights): forward, backward, a
reduce-scatter of each microbatch, the deferred all-reduce, clipping by the global norm, fused AdamW. Prints the median of tokens a second of all
ranks, without the first three steps, and the sum of the ranks' peak memory in KiB: resident, or allocated on the GPU.
"""
import argparse, os, resource, statistics, time, warnings
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
p = argparse.ArgumentParser()
for name, default in dict(microbatches=2, batch=4, layers=3, width=96, heads=4, context=64, vocab=96, steps=30).items():
    p.add_argument(f"--{name}", type=int, default=default)
p.add_argument("--mesh", default="2x2")
p.add_argument("--sdpa", action="store_true", help="PyTorch's fused attention")
p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
a = p.parse_args()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        w = a.width
        self.ln_1, self.ln_2 = nn.LayerNorm(w), nn.LayerNorm(w)
        self.qkv, self.proj = nn.Linear(w, 3 * w), nn.Linear(w, w)
        self.fc, self.out = nn.Linear(w, 4 * w), nn.Linear(4 * w, w)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(b, t, 3, a.heads, w // a.heads).permute(2, 0, 3, 1, 4)
        if a.sdpa:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            s = q @ k.transpose(-1, -2) / (w // a.heads) ** 0.5
            mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
            y = s.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(a.vocab, a.width), nn.Embedding(a.context, a.width)
        self.h = nn.ModuleList(Block() for _ in range(a.layers))
        self.ln_f, self.head = nn.LayerNorm(a.width), nn.Linear(a.width, a.vocab, bias=False)

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.head(self.ln_f(x)).flatten(0, 1), targets.flatten())


on_gpu = a.device == "cuda"
if on_gpu:
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
dist.init_process_group("nccl" if on_gpu else "gloo")
R, S = map(int, a.mesh.split("x"))
mesh = init_device_mesh(a.device, (R, S), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(1)
model = Gpt().to(a.device)
for block in model.h:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
adamw = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
times = []
ended = time.perf_counter()
for step in range(a.steps + 3):
    began = ended
    for m in range(a.microbatches):
        last = m == a.microbatches - 1
        model.set_requires_all_reduce(last)
        model.set_is_last_backward(last)
        ids = torch.randint(a.vocab, (a.batch, a.context + 1)).to(a.device)
        (model(ids[:, :-1], ids[:, 1:]) / a.microbatches).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adamw.step()
    adamw.zero_grad()
    if on_gpu:
        torch.cuda.synchronize()
    ended = time.perf_counter()
    times.append(ended - began)
kib = torch.cuda.max_memory_allocated() // 1024 if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
peak = torch.tensor(kib, device=a.device)
dist.all_reduce(peak)
if dist.get_rank() == 0:
    tokens = a.microbatches * a.batch * a.context * R * S
    print(f"{tokens / statistics.median(times[3:]):.0f} {peak.item()}")
dist.destroy_process_group()
