"""What a call allocates on the CPU."""

import gc

from torch.profiler import ProfilerActivity, profile

import product_order


def peak_bytes(call, mapped=()):
    """Return the largest size of all tensors that a call allocated and had not freed yet, without mapped files."""
    gc.collect()  # what older objects free would be subtracted
    with product_order.suspended(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    mappings = {path.stat().st_size for path in mapped}  # torch reports a mapping as one allocation
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if abs(event.nbytes()) not in mappings:
            total += event.nbytes()
            peak = max(peak, total)
    return peak
