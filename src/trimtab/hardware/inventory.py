"""What this machine is: the device that a process should use, and what it can do natively."""

import torch

from trimtab.errors import RecipeError
from trimtab.log import say_once


def find_device(requested: str | torch.device | None = None) -> torch.device:
    """The device to train on: the one asked for, else the accelerator that torch knows, else the CPU.

    Args:
        requested: A device such as "cpu", "cuda:1" or "mps", or None to look for one.

    Returns:
        A device that exists; an accelerator carries its index.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if requested is None:
        return _with_index(accelerator) if accelerator is not None else torch.device("cpu")
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        raise RecipeError(f"device={requested!r} is no device that torch knows", 'for example device="cpu"') from error
    if device.type in ("cpu", "meta"):
        return device
    if accelerator is None or accelerator.type != device.type:
        found = "only a CPU" if accelerator is None else f"a CPU and {accelerator.type}"
        raise RecipeError(f"device={str(requested)!r} was asked for, but torch finds {found} here", "leave device out")
    if device.index is not None and device.index >= torch.accelerator.device_count():
        count = torch.accelerator.device_count()
        raise RecipeError(f"device={str(requested)!r} was asked for, but there are {count}", f"0 … {count - 1}")
    return _with_index(device)


def _with_index(device: torch.device) -> torch.device:
    if device.index is not None or device.type == "mps":
        return device
    count = torch.accelerator.device_count()
    index = torch.accelerator.current_device_index()
    if count > 1:
        say_once(
            f"one of {count} devices is used ({device.type}:{index}); choose another with device=, "
            "or run one process on each (CUDA_VISIBLE_DEVICES): one run over all of them is not supported yet"
        )
    return torch.device(device.type, index)
