"""Prints the sets of vector instructions that this processor can run, a line of environment variables each.

For `make test-variations`: torch, MKL and oneDNN each choose their kernels by a variable of their own. Only the first
line is for every processor; a set that the processor lacks would end the tests with an illegal instruction.
"""

import torch

# The best is that of `make test`, except for what oneDNN has beyond AVX-512: products of bf16, and AMX.
KNOWN = {
    "default": "MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41",
    "avx2": "MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2",
    "avx512": "MKL_ENABLE_INSTRUCTIONS=AVX512 ONEDNN_MAX_CPU_ISA=AVX512_CORE",
}


def capabilities(best: str) -> list[str]:
    """Those up to the best one; of a processor that is none of x86 only the default, where the libraries differ."""
    names, best = list(KNOWN), best.lower()
    if best not in KNOWN:
        return ["ATEN_CPU_CAPABILITY=default"]
    return [f"ATEN_CPU_CAPABILITY={name} {KNOWN[name]}" for name in names[: names.index(best) + 1]]


if __name__ == "__main__":
    print(*capabilities(torch.backends.cpu.get_cpu_capability()), sep="\n")
