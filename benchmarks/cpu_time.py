"""CPU time of forward passes, for comparisons on machines that do other work at the same time."""

import statistics
import time

import torch


def example_inputs(held_out, num_rows):
    """A batch of `num_rows` copies of the row of median length, on the CPU."""
    lengths = held_out.tokens.lengths
    row = sorted(range(len(lengths)), key=lambda index: lengths[index])[len(lengths) // 2]
    batch = held_out.task.collate([held_out.tokens[row]] * num_rows)
    return {name: value for name, value in batch.items() if name != "labels"}


@torch.inference_mode()
def interleaved(models, inputs, repeats):
    """Median CPU seconds of a forward pass of each model, by name.

    The models take turns: a change of the clock or of the load meets all of them. Threads that spin while they wait
    count as work, so models should run on one thread.
    """
    times = {name: [] for name in models}
    for turn in range(repeats + 2):
        for name, model in models.items():
            started = time.process_time()
            model(**inputs)
            if turn >= 2:  # the first calls allocate memory and prepare kernels
                times[name].append(time.process_time() - started)
    return {name: statistics.median(found) for name, found in times.items()}
