"""What PyTorch has for the kernels of hsdp, on one CUDA device: the peer of benches/benches/gpu_kernels, and measured as there.

    python3 gpu_kernels.py --sizes 1MiB,16MiB,256MiB --csv pytorch.csv
    python3 gpu_kernels.py --check          # each once on the CPU, and whether its result is right: nothing is timed

A size is that of as many elements of f32 as there are; what is moved are the bytes that an operation needs to read and write,
each once, whatever its kernels do. Times are of CUDA events around a row of calls, issued behind a kernel that sleeps until
all of the row is there. The last column compares with copy_ of as many bytes, measured by turns with it. `issue` is what the
host takes for a call. Results, but for those of optimizers, are compared with plain sums and casts before they are timed; what
this build of PyTorch refuses is named on stderr. Without PyTorch or a CUDA device it says so and exits with 2.
"""
import argparse, itertools, math, re, statistics, sys, time

try:
    import torch
except ImportError:
    print("PyTorch is not there: nothing is measured", file=sys.stderr)
    sys.exit(2)

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
MANY, PARAMS, CHUNKS = 100, 12, 8
# Calls of a row, and seconds that the sleep before it may take.
LEAST_CALLS, MOST_CALLS, LONGEST_SLEEP = 3, 50, 2.0
COLUMNS = "kernel,size_bytes,moved_bytes,row,seconds,copy_seconds"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def size(text):
    found = re.fullmatch(r"(\d+) ?(KiB|MiB|GiB)", text)
    if not found or int(found[1]) * UNITS[found[2]] < 64 << 10:
        raise argparse.ArgumentTypeError(f"`{text}` is not a size of 64KiB or more: write 16MiB")
    return int(found[1]) * UNITS[found[2]]


def size_name(bytes):
    name = next(name for name in ("GiB", "MiB", "KiB") if bytes % UNITS[name] == 0 or name == "KiB")
    return f"{bytes // UNITS[name]} {name}"


def options():
    parser = argparse.ArgumentParser(description="Times PyTorch's operations for the work of hsdp's kernels.")
    parser.add_argument("--sizes", type=lambda text: [size(one) for one in text.split(",")],
                        default="1MiB,16MiB,256MiB")
    parser.add_argument("--only", default="", help="how names begin, with commas between them")
    parser.add_argument("--samples", type=int, default=15, help="rows of calls that are timed")
    parser.add_argument("--each", type=float, default=0.002, help="how long a row takes, in seconds")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--csv", help="a file for what every row took, in seconds a call")
    parser.add_argument("--check", action="store_true", help="each once on the CPU: nothing is timed")
    return parser.parse_args()


class Case:
    """A call with its tensors: the bytes that it needs to move, what it has written, and what that must be after one call."""

    def __init__(self, call, bytes, found=None, expected=None, tolerance=0.0):
        self.call, self.bytes, self.found, self.expected, self.tolerance = call, bytes, found, expected, tolerance

    def check(self, name):
        wanted = self.expected() if self.expected else None
        self.call()
        if wanted is None:
            return
        for found, expected in zip(self.found(), wanted, strict=True):
            if not torch.allclose(found.double(), expected.double(), rtol=self.tolerance, atol=0.0):
                sys.exit(f"{name}: a result is wrong")


def numbers(dtype, len, seed, device):
    generator = torch.Generator(device=device).manual_seed(seed)
    return (torch.rand(len, generator=generator, device=device) * 4 - 2).to(dtype)


def bytes_of(*tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def pieces(count, dtypes, len, device):
    """Tensors whose dtypes follow each other in turn."""
    # As long as each other, in multiples of 32, as the bench of hsdp has them.
    each = max(len // count // 32, 1) * 32
    return [numbers(dtype, each, index, device) for index, dtype in zip(range(count), itertools.cycle(dtypes))]


def foreach_copy(count, dtypes, flat):
    """Gradients into the parts of a flat buffer, cast."""

    def make(len, device):
        sources = pieces(count, dtypes, len, device)
        target = torch.full((sum(it.numel() for it in sources),), math.nan, dtype=flat, device=device)
        parts = list(target.split(sources[0].numel()))
        return Case(lambda: torch._foreach_copy_(parts, sources), bytes_of(target, *sources),
                    lambda: [target], lambda: [torch.cat([it.to(flat) for it in sources])])

    return make


def chunk_cat(count, dtype, flat):
    """What FSDP2 packs with: each gradient cut into chunks, one for each rank, and the first chunks of all before the second."""

    def make(len, device):
        sources = [it.view(CHUNKS, -1) for it in pieces(count, [dtype], len, device)]
        target = torch.full((CHUNKS, sum(it.numel() for it in sources) // CHUNKS), math.nan, dtype=flat, device=device)
        return Case(lambda: torch._chunk_cat(sources, dim=0, num_chunks=CHUNKS, out=target), bytes_of(target, *sources),
                    lambda: [target], lambda: [torch.cat(sources, dim=1).to(flat)])

    return make


def accumulate(dtype):
    def make(len, device):
        target, wire = numbers(F32, len, 1, device), numbers(dtype, len, 2, device)
        return Case(lambda: target.add_(wire), 2 * bytes_of(target) + bytes_of(wire),
                    lambda: [target], lambda: [target + wire.float()])

    return make


def copy(dtype):
    def make(len, device):
        source, target = numbers(F32, len, 1, device), torch.full((len,), math.nan, dtype=dtype, device=device)
        return Case(lambda: target.copy_(source), bytes_of(source, target), lambda: [target], lambda: [source.to(dtype)])

    return make


def foreach_norm(len, device):
    values = [numbers(F32, len, 1, device)]
    norms = []

    def call():
        norms[:] = torch._foreach_norm(values)

    return Case(call, bytes_of(*values), lambda: norms, lambda: [values[0].double().norm()], tolerance=1e-4)


def clip_grad_norm(count):
    """The norm, then all gradients times what it says: hsdp has that in its update."""

    def make(len, device):
        gradients = pieces(count, [F32], len, device)
        parameters = [torch.nn.Parameter(torch.empty(it.numel(), device=device)) for it in gradients]
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        # Always clipped, and never to zero.
        return Case(lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True), 3 * bytes_of(*gradients),
                    lambda: [torch.cat(gradients).double().norm()], lambda: [torch.ones((), dtype=torch.double, device=device)],
                    tolerance=1e-4)

    return make


def updates(rule, count, states):
    def make(len, device):
        parameters = [torch.nn.Parameter(it) for it in pieces(count, [F32], len, device)]
        for parameter in parameters:
            parameter.grad = numbers(F32, parameter.numel(), 3, device)
        optimizer = rule(parameters)
        return Case(optimizer.step, (2 * (1 + states) + 1) * bytes_of(*[it.data for it in parameters]))

    return make


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, fused=True)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=0.1, fused=True)


CASES = {
    "copy_ f32": copy(F32),
    "copy_ f32 to bf16": copy(BF16),
    "copy_ f32 to f16": copy(F16),
    "add_ bf16 to f32": accumulate(BF16),
    "add_ f32 to f32": accumulate(F32),
    "_foreach_norm": foreach_norm,
    "clip_grad_norm_, 1 x": clip_grad_norm(1),
    f"clip_grad_norm_, {MANY} x": clip_grad_norm(MANY),
    "adamw fused, 1 x": updates(adamw, 1, 2),
    f"adamw fused, {MANY} x": updates(adamw, MANY, 2),
    "sgd fused, 1 x": updates(sgd, 1, 1),
    f"sgd fused, {MANY} x": updates(sgd, MANY, 1),
}
for kinds, said in [([F32], "f32"), ([BF16], "bf16"), ([F32, BF16], "mixed")]:
    for wire, to in [(BF16, "bf16"), (F32, "f32")]:
        CASES[f"_foreach_copy_ {MANY} x {said} to {to}"] = foreach_copy(MANY, kinds, wire)
for (kind, said), (wire, to) in itertools.product([(F32, "f32"), (BF16, "bf16")], repeat=2):
    CASES[f"_chunk_cat {MANY} x {said} to {to}"] = chunk_cat(MANY, kind, wire)


def row(case, calls):
    """Seconds of one call on the device, behind a sleep that is over when all are issued."""
    asleep = 0.0005
    while asleep < LONGEST_SLEEP:
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # In cycles: no clock runs at more than 2.5 GHz.
        torch.cuda._sleep(int(asleep * 2.5e9))
        began.record()
        for _ in range(calls):
            case.call()
        ended.record()
        in_time = not began.query()
        ended.synchronize()
        if in_time:
            return began.elapsed_time(ended) / 1e3 / calls
        asleep *= 2
    sys.exit(f"the host has not issued {calls} calls in {LONGEST_SLEEP} s")


def fitting(case, each):
    for _ in range(3):
        case.call()
    one = max(row(case, LEAST_CALLS), 1e-9)
    return min(max(int(each / one), LEAST_CALLS), MOST_CALLS)


def measure(case, asked):
    reference = copy(F32)(max(case.bytes // 8, 1), "cuda")
    calls = [fitting(it, asked.each) for it in (case, reference)]
    rows = [(row(case, calls[0]), row(reference, calls[1])) for _ in range(asked.samples)]
    return [it[0] for it in rows], [it[1] for it in rows]


def issue(case, asked, calls=20):
    """Seconds of the host for a call, without a wait for the device."""
    times = []
    for _ in range(asked.samples + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            case.call()
        times.append((time.perf_counter() - began) / calls)
    torch.cuda.synchronize()
    return times[1:]


def seconds(number):
    return f"{number * 1e6:.2f} us" if number < 1e-3 else f"{number * 1e3:.3f} ms"


def report(file, name, of, bytes, times, copies):
    for index, (one, other) in enumerate(zip(times, copies)):
        if file:
            print(f'"{name}",{of or 0},{bytes},{index},{one:.9f},{other:.9f}', file=file, flush=True)
    median = statistics.median(times)
    rate = f"{bytes / median / 1e9:.1f}" if of else "-"
    print(f"{name:<38}{size_name(of) if of else '-':>11}{bytes / 1e6:>11.2f}{seconds(min(times)):>11}{seconds(median):>11}"
          f"{rate:>11}{statistics.median(copies) / median:>11.2f}", flush=True)


def each_case(asked, device):
    """Those that are asked for and that this build of PyTorch does not refuse, once checked."""
    for name, make in CASES.items():
        if not any(name.startswith(begin) for begin in asked.only.split(",")):
            continue
        try:
            make(20_000, device).check(name)
        except (RuntimeError, NotImplementedError) as refused:
            print(f"{name}: PyTorch refuses it: {str(refused).splitlines()[0]}", file=sys.stderr)
            continue
        yield name, make


def main():
    asked = options()
    if asked.check:
        checked = [name for name, _ in each_case(asked, "cpu")]
        print(f"PyTorch {torch.__version__}: {len(checked)} of {len(CASES)} run here, and are right")
        return 0
    if not torch.cuda.is_available():
        print("PyTorch finds no CUDA device: nothing is measured", file=sys.stderr)
        return 2
    torch.cuda.set_device(asked.device)
    file = open(asked.csv, "w") if asked.csv else None
    if file:
        print(COLUMNS, file=file)
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}")
    print(f"{'kernel':<38}" + "".join(f"{name:>11}" for name in ("size", "MB moved", "least", "median", "GB/s", "of a copy")))
    cases = list(each_case(asked, "cuda"))
    for bytes in asked.sizes:
        for name, make in cases:
            case = make(bytes // 4, "cuda")
            report(file, name, bytes, case.bytes, *measure(case, asked))
    for name, make in [("pack", foreach_copy(PARAMS, [BF16], BF16)), ("sum", accumulate(BF16))]:
        name = f"issue: {name}, {PARAMS} parameters"
        if any(name.startswith(begin) for begin in asked.only.split(",")):
            case = make(PARAMS * 1024, "cuda")
            report(file, name, None, case.bytes, issue(case, asked), issue(copy(F32)(case.bytes // 8, "cuda"), asked))
    return 0


sys.exit(main())
