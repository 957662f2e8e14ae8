"""Time of forward passes of several models in turns."""

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
    """Median seconds of a forward pass of each model, by name: on a CPU of CPU time on one thread, which other work on
    the machine changes little, on a GPU until the result is there.

    The models take turns: a change of the clock or of the load meets all of them. On several threads, those that spin
    while they wait would count as work.
    """
    is_cuda = next(iter(inputs.values())).is_cuda
    clock = time.perf_counter if is_cuda else time.process_time
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times = {name: [] for name in models}
    for turn in range(repeats + 2):
        for name, model in models.items():
            started = clock()
            model(**inputs)
            if is_cuda:
                torch.cuda.synchronize()
            if turn >= 2:  # the first calls allocate memory and prepare kernels
                times[name].append(clock() - started)
    torch.set_num_threads(num_threads)
    return {name: statistics.median(found) for name, found in times.items()}
