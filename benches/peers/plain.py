"""A whole training step of the example's GPT by plain PyTorch: one process, all cores, no FSDP.

    V/bin/python plain.py --batch 16 --steps 30 --sdpa --compile --bf16
    V/bin/python plain.py --product 1536

A microbatch is one batch of all sequences that the ranks of `train_gpt` have in theirs. A step is
forward and backward of each microbatch, clipping by the global norm and fused AdamW. Prints the
median of tokens a second, without the first three steps, and the peak resident memory in KiB.

`--product N` prints the Gflop/s of an f32 product of N x N matrices instead, the best of ten.
"""
import argparse, os, resource, statistics, sys, time, warnings
import torch
from gpt_model import Gpt, add_options

warnings.filterwarnings("ignore")
p = argparse.ArgumentParser()
add_options(p, batch=16)
p.add_argument("--compile", action="store_true", help="torch.compile the model")
p.add_argument("--bf16", action="store_true", help="autocast to bf16")
p.add_argument("--product", type=int, metavar="N", help="measure a product of N x N instead")
a = p.parse_args()
torch.set_num_threads(len(os.sched_getaffinity(0)))


def product(n):
    """Returns the Gflop/s of the fastest of ten f32 products of n x n, after one to warm up."""
    x, y = torch.randn(n, n), torch.randn(n, n)
    seconds = []
    for _ in range(11):
        began = time.perf_counter()
        x @ y
        seconds.append(time.perf_counter() - began)
    return 2 * n**3 / min(seconds[1:]) / 1e9


def step(loss_of, parameters, adamw):
    """Trains on one step's random tokens."""
    for _ in range(a.microbatches):
        ids = torch.randint(a.vocab, (a.batch, a.context + 1))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=a.bf16):
            loss = loss_of(ids[:, :-1], ids[:, 1:]) / a.microbatches
        loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    adamw.step()
    adamw.zero_grad()


def train():
    """Returns the median of tokens a second of all steps but the first three."""
    torch.manual_seed(1)
    model = Gpt(a)
    parameters = list(model.parameters())
    adamw = torch.optim.AdamW(parameters, lr=3e-3, fused=True)
    loss_of = torch.compile(model) if a.compile else model
    times = []
    for number in range(a.steps + 3):
        began = time.perf_counter()
        try:
            step(loss_of, parameters, adamw)
        except Exception as error:
            if not (a.compile and number == 0):
                raise
            # The first step compiles. The first line of its error is the one worth reading.
            reason = next(iter(str(error).strip().splitlines()), "")
            sys.exit(f"torch.compile failed: {type(error).__name__}: {reason}")
        times.append(time.perf_counter() - began)
    return a.microbatches * a.batch * a.context / statistics.median(times[3:])


if a.product:
    print(f"{product(a.product):.1f}")
else:
    speed = train()
    print(f"{speed:.0f} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}")
