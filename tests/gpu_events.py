"""Counts what the host asks of a GPU, with torch's profiler."""

import torch

# Names under which kernels are counted that the host launches, through the runtime and through the driver.
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx")


def new_profiler():
    """A profiler of host and device; without `acc_events` it would warn that it forgets other cycles."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    return torch.profiler.profile(activities=activities, acc_events=True)


def counts_of(profiler):
    """How often each event happened."""
    return {event.key: event.count for event in profiler.key_averages()}


def events_of(function):
    """Call a function; how often each event happened meanwhile."""
    with new_profiler() as profiler:
        function()
        torch.cuda.synchronize()
    return counts_of(profiler)


def num_kernels(counts):
    """Kernels that the host launched one by one."""
    return sum(counts.get(name, 0) for name in _LAUNCHES)


def num_graphs(counts):
    """CUDA graphs that the host launched."""
    return counts.get("cudaGraphLaunch", 0)
