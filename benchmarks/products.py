"""Time of the product of a linear layer on a GPU, for weights in the forms that trimtab writes.

    python benchmarks/products.py --out benchmarks/results
    python benchmarks/products.py --small --device cpu          # does it run? forms that need CUDA say so

One layer without bias, activations in bf16. Weights rotate over so many copies that none is in the L2 cache when its
turn comes. "GPU" is the median of single products between two CUDA events, queued behind a kernel that waits, so that
the time in which Python and the libraries prepare a product is not in it; "as called" is the mean of products called
one after the other, so the longer of both. Error: of the product, relative to the fp32 product of the weights before
they were rounded (Frobenius norms). Every form is made and timed on its own: one that fails is a line with its reason.
It takes less than a minute; what has not begun when `--limit` seconds have passed is left out, and says so. `--compile`
adds products compiled by Inductor, which fuse the decoding of weights of torchao, and takes about a minute more.
"""

import argparse
import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from record import keep, machine
from torch.nn import functional

from trimtab.compress.clustered_modules import ClusteredLinear
from trimtab.compress.clustered_weight import ClusteredWeight
from trimtab.compress.clustering import ClusterSettings, cluster_weight
from trimtab.compress.weight_formats import FORMATS

PACKAGES = ["torch", "torchao", "bitsandbytes", "triton"]
NUM_ROWS = (1, 32)
SIZES = ((4096, 4096), (14336, 4096))  # rows and columns of the weight: out and in
SMALL_SIZES = ((256, 256),)
REPEATED_ROWS = 64  # of random weights; the others repeat them, so that clustering takes no time
MAX_COPIES = 40
NUM_TIMINGS = 60
SLEEP_CYCLES_PER_S = 2e9  # about the clock of the GPU
Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Form:
    """A way to store a weight and to multiply with it.

    Args:
        make: Returns a product with a copy of the weight, and the bytes of that copy.
        needs_cuda: Why it cannot run on a CPU; empty if it can.
    """

    make: Callable[[torch.Tensor], tuple[Product, int]]
    needs_cuda: str = ""


def linear_of(weight):
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    return layer


def plain(weight):
    layer = linear_of(weight)
    return layer, layer.weight.nbytes


def quantized(name):
    def make(weight):
        layer = FORMATS[name].quantized(linear_of(weight))
        return layer, sum(map(bytes_of, layer.state_dict().values()))

    return make


def compiled(name):
    torch._dynamo.config.recompile_limit = 64  # a graph for every form, size and number of rows
    multiply = torch.compile(lambda x, weight: functional.linear(x, weight), dynamic=False)

    def make(weight):
        layer, num_bytes = quantized(name)(weight)
        return lambda x: multiply(x, layer.weight), num_bytes

    return make


def bytes_of(tensor):
    """Bytes of a tensor, or of the tensors that a tensor of torchao is made of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    return sum(bytes_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


def clustered(weight):
    """A palette of 16 values for 32 rows and a scale of 8 bits for 64 columns, as `trimtab cluster` writes them."""
    found, times = palettes_of(weight), len(weight) // REPEATED_ROWS
    repeated = {
        name: getattr(found, name).repeat(times, 1).contiguous() for name in ("packed_OB", "palettes_GK", "scales_OS")
    }
    return ClusteredLinear(replace(found, **repeated), dtype=weight.dtype)


@functools.lru_cache(maxsize=1)
def palettes_of(weight):
    """The palettes of the rows that are repeated; found once for all copies."""
    return cluster_weight(weight[:REPEATED_ROWS], ClusterSettings(bits=4, rows=REPEATED_ROWS // 2))


def from_indices(weight):
    from trimtab.compress.palette_kernel import multiply

    stored: ClusteredWeight = clustered(weight).clustered
    return lambda x: multiply(x, stored), stored.num_bytes


def decoded(weight):
    layer = clustered(weight)
    return lambda x: functional.linear(x, layer.matrix()), layer.clustered.num_bytes


def forms_of(with_compiled):
    names = ("int8", "int8-dynamic", "int4", "fp8", "fp8-dynamic", "nf4")
    forms = {"bf16": Form(plain), **{name: Form(quantized(name)) for name in names}}
    forms["palette of 4 bits, from indices"] = Form(from_indices, "a Triton kernel computes it, on CUDA only")
    forms["palette of 4 bits, decoded first"] = Form(decoded)
    if with_compiled:
        forms |= {f"{name}, compiled": Form(compiled(name)) for name in ("int8", "int8-dynamic", "fp8", "fp8-dynamic")}
    return forms


# ---------------------------------------------------------------------- timing


def num_copies(num_bytes, device):
    """Enough copies that three times the L2 cache is read between two products with the same one."""
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MAX_COPIES, math.ceil(3 * cache / num_bytes) + 1)


class Clock:
    """Times products of a device, in microseconds."""

    def __init__(self, device, num_timings):
        self.is_cuda, self.num_timings = device.type == "cuda", num_timings

    def synchronize(self):
        if self.is_cuda:
            torch.cuda.synchronize()

    def gpu_us(self, products, x, host_s):
        """Median of single products that the GPU finds in its queue; None on a CPU, which has no queue."""
        if not self.is_cuda:
            return None
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.num_timings)]
        for number, (start, end) in enumerate(pairs):
            torch.cuda._sleep(int((3 * host_s + 5e-5) * SLEEP_CYCLES_PER_S))
            start.record()
            products[number % len(products)](x)
            end.record()
        self.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e3

    def called_us(self, products, x):
        """Mean of products that are called one after the other."""
        self.synchronize()
        started = time.perf_counter()
        for number in range(self.num_timings):
            products[number % len(products)](x)
        self.synchronize()
        return (time.perf_counter() - started) / self.num_timings * 1e6

    def host_s(self, products, x):
        """Median time until a product is in the queue."""
        times = []
        for product in products[:8]:
            self.synchronize()
            started = time.perf_counter()
            product(x)
            times.append(time.perf_counter() - started)
        self.synchronize()
        return statistics.median(times)


def relative_error(product, x, weight):
    exact = x.float() @ weight.float().T
    return ((product(x).float() - exact).norm() / exact.norm()).item()


@torch.no_grad()
def time_form(form, weight, clock):
    """Make copies of one form and time them with each number of rows."""
    first, num_bytes = form.make(weight)
    products = [first, *(form.make(weight)[0] for _ in range(num_copies(num_bytes, weight.device) - 1))]
    found = {"bytes": num_bytes, "copies": len(products), "rows": {}}
    for num_rows in NUM_ROWS:
        x = torch.randn(num_rows, weight.shape[1], device=weight.device, dtype=weight.dtype)
        try:
            found["rows"][num_rows] = time_products(products, x, clock) | {"error": relative_error(first, x, weight)}
        except Exception as error:  # some kernels need more rows than one
            found["rows"][num_rows] = {"failure": reason_of(error)}
    return found


def time_products(products, x, clock):
    for product in products[:3]:  # the first calls choose or compile kernels
        product(x)
    host_s = clock.host_s(products, x)
    return {"gpu_us": clock.gpu_us(products, x, host_s), "called_us": clock.called_us(products, x)}


def reason_of(error):
    return f"{type(error).__name__}: {error}".splitlines()[0]


def refusal(name, form, device):
    """Why a form cannot be used here; empty if it can."""
    if form.needs_cuda and device.type != "cuda":
        return form.needs_cuda
    if known := FORMATS.get(name.removesuffix(", compiled")):
        known.check_device(device)
    return ""


def measure(sizes, device, limit_s, with_compiled):
    """Time every form with every size; what fails has a reason instead of figures."""
    started = time.monotonic()
    clock = Clock(device, NUM_TIMINGS if device.type == "cuda" else 5)
    found = []
    for size in sizes:
        torch.manual_seed(0)
        weight = (torch.randn(REPEATED_ROWS, size[1], device=device) * 0.02).repeat(size[0] // REPEATED_ROWS, 1)
        weight = weight.bfloat16()
        for name, form in forms_of(with_compiled).items():
            entry = {"size": size, "form": name}
            try:
                late = time.monotonic() - started > limit_s
                reason = f"not begun within {limit_s:g} s" if late else refusal(name, form, device)
                entry |= {"failure": reason} if reason else time_form(form, weight, clock)
            except Exception as error:  # whatever a library throws: the other forms are timed
                entry["failure"] = reason_of(error)
            found.append(entry)
            print(entry, flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return found


# ---------------------------------------------------------------------- table


def cells_of(mine, base):
    """Times, and how many times as fast as bf16: by the time of the GPU, or of calls on a CPU."""
    if "failure" in mine:
        return [mine["failure"].replace("|", "/"), "", ""]
    key = "called_us" if mine["gpu_us"] is None else "gpu_us"
    gain = f"{base[key] / mine[key]:.2f}" if base and key in base else ""
    return ["" if mine["gpu_us"] is None else f"{mine['gpu_us']:.1f}", f"{mine['called_us']:.1f}", gain]


def markdown(found):
    heads = [f"{rows} row{'s' * (rows > 1)}: {what}" for rows in NUM_ROWS for what in ("GPU µs", "as called µs", "×")]
    lines = ["| weight | form | MB | " + " | ".join(heads) + " | error |", "|---" * (4 + len(heads)) + "|"]
    bases = {tuple(entry["size"]): entry for entry in found if entry["form"] == "bf16" and "rows" in entry}
    for entry in found:
        start = f"| {entry['size'][0]} × {entry['size'][1]} | {entry['form']} | "
        if "failure" in entry:
            lines.append(start + f"{entry['failure'].replace('|', '/')} |")
            continue
        cells, base = [f"{entry['bytes'] / 1e6:.1f}"], bases.get(tuple(entry["size"]))
        for rows, one in entry["rows"].items():
            cells += cells_of(one, base["rows"][rows] if base else None)
        error = entry["rows"][NUM_ROWS[-1]].get("error")
        lines.append(start + " | ".join([*cells, "" if error is None else f"{error:.4f}"]) + " |")
    return "\n".join(lines)


def text_of(report):
    where = "; ".join(f"{name}: {value}" for name, value in report["machine"].items())
    about = (
        "Microseconds of one product x Wᵀ with x in bf16, each product with a weight that is not in the L2 cache. GPU: "
        f"median of {report['timings']} products that wait in the queue, between CUDA events (an empty pair of events "
        f"reads {report['empty_us']:.1f}); as called: mean of {report['timings']} calls one after the other, with what "
        "Python and the libraries do on the CPU; ×: how many times as fast as bf16 (GPU); error: of 32 rows, relative "
        "to the product before rounding. MB: of the weight as stored, with scales and palettes. Not compiled, except "
        "where a line says so.\n\n"
        if report["empty_us"] is not None
        else "A trial on a CPU: these times say nothing about a GPU.\n\n"
    )
    return f"{about}{markdown(report['products'])}\n\n`benchmarks/products.py` makes this table. {where}.\n"


def empty_us(device):
    """What two events read that have nothing between them."""
    if device.type != "cuda":
        return None
    return Clock(device, NUM_TIMINGS).gpu_us([lambda x: x], None, 0.0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for products-DEVICE.json and .md")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="one small weight")
    parser.add_argument("--compile", action="store_true", help="also products that Inductor compiles")
    parser.add_argument("--limit", type=float, default=45, help="seconds after which no form is begun")
    args = parser.parse_args()
    device = torch.device(args.device)
    warnings.filterwarnings("ignore", module="torchao|bitsandbytes")
    report = {
        "machine": machine(args.device, torch.get_num_threads(), PACKAGES),
        "timings": NUM_TIMINGS,
        "empty_us": empty_us(device),
        "products": measure(SMALL_SIZES if args.small else SIZES, device, args.limit, args.compile),
    }
    text = text_of(report)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        name = torch.cuda.get_device_name(device).split()[-1].lower() if device.type == "cuda" else device.type
        keep(report, text, "Products of one layer", args.out / f"products-{name}")
    print(text)


if __name__ == "__main__":
    main()
