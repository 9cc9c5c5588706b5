"""The collectives of PyTorch's gloo backend, on f32: the peer of benches/benches/collectives, which measures them in the same way.

    V/bin/torchrun --nproc_per_node 4 gloo.py 15 0.01 8 1024 16777216      # rows, seconds a row, sizes in bytes

A size is that of the larger of a rank's two buffers. A time is that of one call, in a row of calls, from the first rank that
begins it to the last that ends it. Results are compared with their closed forms before they are timed. A line for each
collective and size: name, ranks, bytes, least and median in seconds. What this build of gloo refuses is named on stderr.
"""
import sys, time, warnings

import torch
import torch.distributed as dist

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
dist.init_process_group("gloo")
RANK, RANKS = dist.get_rank(), dist.get_world_size()
NEXT, PREVIOUS = (RANK + 1) % RANKS, (RANK - 1) % RANKS
ROWS, EACH, SIZES = int(sys.argv[1]), float(sys.argv[2]), [int(size) for size in sys.argv[3:]]


def brought(rank, count, start=0):
    """What a rank brings to some indices: small whole numbers, in which rank and index show."""
    return ((rank + 1) * (torch.arange(start, start + count) % 7 + 1)).float()


def total(count, start=0):
    return sum(brought(rank, count, start) for rank in range(RANKS))


def gathered(part):
    return torch.cat([brought(rank, part) for rank in range(RANKS)])


class Buffers:
    def __init__(self, part):
        self.part, self.whole = part, part * RANKS
        self.mine, self.all = brought(RANK, part), brought(RANK, self.whole)
        self.small, self.large = torch.full((part,), torch.nan), torch.full((self.whole,), torch.nan)
        self.parts, self.large_parts = list(self.all.split(part)), list(self.large.split(part))


def send_recv(it):
    sent = dist.isend(it.all, NEXT)
    dist.recv(it.large, PREVIOUS)
    sent.wait()


# Name: the call, what is checked, and what it must be.
COLLECTIVES = {
    "all_gather": (
        lambda it: dist.all_gather_into_tensor(it.large, it.mine),
        lambda it: (it.large, gathered(it.part))),
    "reduce_scatter": (
        lambda it: dist.reduce_scatter_tensor(it.small, it.all),
        lambda it: (it.small, total(it.part, RANK * it.part))),
    "all_reduce": (
        lambda it: dist.all_reduce(it.all),
        lambda it: (it.all, total(it.whole))),
    "broadcast": (
        lambda it: dist.broadcast(it.all, 0),
        lambda it: (it.all, brought(0, it.whole))),
    "reduce": (
        lambda it: dist.reduce(it.all, 0),
        lambda it: (it.all, total(it.whole)) if RANK == 0 else (it.mine, it.mine)),
    "gather": (
        lambda it: dist.gather(it.mine, it.large_parts if RANK == 0 else None, 0),
        lambda it: (it.large, gathered(it.part)) if RANK == 0 else (it.mine, it.mine)),
    "scatter": (
        lambda it: dist.scatter(it.small, it.parts if RANK == 0 else None, 0),
        lambda it: (it.small, brought(0, it.part, RANK * it.part))),
    "all_to_all": (
        lambda it: dist.all_to_all_single(it.large, it.all),
        lambda it: (it.large, torch.cat([brought(rank, it.part, RANK * it.part) for rank in range(RANKS)]))),
    "send_recv": (
        send_recv,
        lambda it: (it.large, brought(PREVIOUS, it.whole))),
    "barrier": (lambda it: dist.barrier(), None),
}


def row(call, buffers, calls):
    dist.barrier()
    began = time.clock_gettime(time.CLOCK_MONOTONIC)
    for _ in range(calls):
        call(buffers)
    ended = time.clock_gettime(time.CLOCK_MONOTONIC)
    span = torch.tensor([-began, ended], dtype=torch.float64)
    dist.all_reduce(span, dist.ReduceOp.MAX)
    return (span[0] + span[1]).item() / calls


def measure(name, size):
    call, result = COLLECTIVES[name]
    it = Buffers(max(1, size // 4 // RANKS))
    call(it)
    if result:
        found, expected = result(it)
        if not torch.equal(found, expected):
            at = int((found != expected).nonzero()[0])
            sys.exit(f"{name}, {it.whole * 4} B, {RANKS} ranks: on rank {RANK}, "
                     f"element {at} is {found[at]:g}, not {expected[at]:g}")
    # Sums of zeros stay finite, however often they are the input of the next call.
    it.all.zero_()
    calls = round(min(max(EACH / row(call, it, 2), 5), 10000))
    times = sorted(row(call, it, calls) for _ in range(ROWS))
    if RANK == 0:
        print(name, RANKS, it.whole * 4 if result else 0, f"{times[0]:.9f} {times[ROWS // 2]:.9f}", flush=True)


for name in COLLECTIVES:
    for size in SIZES if COLLECTIVES[name][1] else SIZES[:1]:
        try:
            measure(name, size)
        except (RuntimeError, NotImplementedError) as refused:
            if RANK == 0:
                print(f"{name}, {size} B: gloo refuses it: {str(refused).splitlines()[0]}", file=sys.stderr)
            break
dist.destroy_process_group()
