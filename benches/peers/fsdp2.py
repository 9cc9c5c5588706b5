"""The accumulation benchmark, by PyTorch FSDP2 (HSDP) over gloo on the CPU: the peer to be measured beside.

    python3 -m venv V && V/bin/pip install torch numpy          # about 5 GB
    OMP_NUM_THREADS=1 V/bin/torchrun --nproc_per_node 4 fsdp2.py --mesh 2x2 --units 8 --numel 2000000 --microbatches 8

The work of one step: every microbatch unshards each unit for the forward, unshards it again for the backward, and
reduces a gradient that is already there (no arithmetic of a model): all-gathers, pack, reduce-scatters, the partial
sums, and the deferred all-reduce. The optimizer is not part of it. Prints the median and the least of --repeat steps.
"""
import argparse, statistics, time, warnings
import torch, torch.distributed as dist, torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
p = argparse.ArgumentParser()
p.add_argument("--mesh", default="2x2")
p.add_argument("--units", type=int, default=8)
p.add_argument("--numel", type=int, default=2_000_000, help="parameters in one unit")
p.add_argument("--microbatches", type=int, default=8)
p.add_argument("--reduce-dtype", default="float32")
p.add_argument("--mode", default="reduce_scatter", choices=["reduce_scatter", "every", "local"])
p.add_argument("--repeat", type=int, default=5)
a = p.parse_args()


class Given(torch.autograd.Function):
    """Passes x on; the gradient of the weight is the one given."""

    @staticmethod
    def forward(ctx, x, w, g):
        ctx.g = g
        return x.clone()

    @staticmethod
    def backward(ctx, gx):
        return gx, ctx.g, None


class Unit(nn.Module):
    def __init__(self, numel):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(numel // 1000, 1000))
        self.g = torch.full((numel // 1000, 1000), 0.5)

    def forward(self, x):
        return Given.apply(x, self.w, self.g)


dist.init_process_group("gloo")
R, S = map(int, a.mesh.split("x"))
mesh = init_device_mesh("cpu", (R, S), mesh_dim_names=("replicate", "shard"))
model = nn.Sequential(*[Unit(a.numel) for _ in range(a.units)])
policy = MixedPrecisionPolicy(reduce_dtype=getattr(torch, a.reduce_dtype))
for u in model:
    fully_shard(u, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)


def step():
    for m in range(a.microbatches):
        last = m == a.microbatches - 1
        if a.mode == "reduce_scatter":
            model.set_requires_all_reduce(last)
        elif a.mode == "local":
            model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        model(torch.ones(1, requires_grad=True)).sum().backward()
    for q in model.parameters():
        q.grad = None


step()
times = []
for _ in range(a.repeat):
    dist.barrier()
    t = time.perf_counter()
    step()
    dist.barrier()
    times.append(time.perf_counter() - t)
if dist.get_rank() == 0:
    print(f"PyTorch {torch.__version__} FSDP2 gloo mesh {a.mesh} units {a.units} x {a.numel} microbatches {a.microbatches} "
          f"{a.mode} {a.reduce_dtype}: median {statistics.median(times):.4f} s, least {min(times):.4f} s a step")
dist.destroy_process_group()
