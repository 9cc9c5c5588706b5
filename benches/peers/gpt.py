"""A whole training step of the example's GPT by PyTorch FSDP2 (HSDP): the peer of `train_gpt`, over
gloo on the CPU or over NCCL on a GPU.

    OMP_NUM_THREADS=1 V/bin/torchrun --nproc_per_node 4 gpt.py --mesh 2x2 --steps 30
    torchrun --nproc_per_node 1 gpt.py --device cuda --mesh 1x1 --sdpa

A step is forward and backward in f32, a reduce-scatter of each microbatch, the deferred all-reduce,
clipping by the global norm, and fused AdamW. Prints the median of tokens a second of all ranks,
without the first three steps, and the sum of the ranks' peak memory in KiB: resident, or allocated
on the GPU.
"""
import argparse, os, resource, statistics, time, warnings
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from gpt_model import Gpt, add_options

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
p = argparse.ArgumentParser()
add_options(p, batch=4)
p.add_argument("--mesh", default="2x2")
p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
a = p.parse_args()

on_gpu = a.device == "cuda"
if on_gpu:
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
dist.init_process_group("nccl" if on_gpu else "gloo")
R, S = map(int, a.mesh.split("x"))
mesh = init_device_mesh(a.device, (R, S), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(1)
model = Gpt(a).to(a.device)
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
if on_gpu:
    kib = torch.cuda.max_memory_allocated() // 1024
else:
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
peak = torch.tensor(kib, device=a.device)
dist.all_reduce(peak)
if dist.get_rank() == 0:
    tokens = a.microbatches * a.batch * a.context * R * S
    print(f"{tokens / statistics.median(times[3:]):.0f} {peak.item()}")
dist.destroy_process_group()
