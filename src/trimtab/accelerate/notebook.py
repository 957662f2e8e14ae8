"""`notebook_launcher` with Accelerate's arguments."""

from collections.abc import Callable, Sequence
from typing import Any

from trimtab.distributed.launch.notebook import launch
from trimtab.errors import RecipeError


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int | None = None,
    **options: Any,
) -> Any:
    """Call a function on several processes of this host, or in this process if `num_processes` is 1.

    Args:
        function: The function; it creates its own `Accelerator`.
        args: Its arguments.
        num_processes: The number of processes; 1 by default.
        mixed_precision: Must be "no"; pass the precision to the `Accelerator` instead.
        use_port: The port of the rendezvous; a free one by default.
        options: Other options of Accelerate's launcher; any that is not None raises an error.

    Returns:
        The results of all processes in rank order; with one process, its result alone.
    """
    if mixed_precision != "no":
        raise RecipeError(
            f"notebook_launcher(mixed_precision={mixed_precision!r}) is not supported",
            f"use Accelerator(mixed_precision={mixed_precision!r}) inside the function",
        )
    refused = sorted(name for name, value in options.items() if value is not None)
    if refused:
        raise RecipeError(
            f"notebook_launcher({refused[0]}=…) is not supported", "use trimtab launch; see docs/distributed.md"
        )
    if num_processes is None or num_processes == 1:
        return function(*args)
    return launch(function, args, processes=num_processes, port=None if use_port is None else int(use_port))
