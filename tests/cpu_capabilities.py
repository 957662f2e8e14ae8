"""Prints the values of ATEN_CPU_CAPABILITY that this processor can run, for `make test-variations`."""

import torch

KNOWN = ("default", "avx2", "avx512")


def capabilities(best: str) -> tuple[str, ...]:
    """Those up to the best one; of a processor that is none of x86 only the default."""
    best = best.lower()
    return KNOWN[: KNOWN.index(best) + 1] if best in KNOWN else KNOWN[:1]


if __name__ == "__main__":
    print(*capabilities(torch.backends.cpu.get_cpu_capability()))
