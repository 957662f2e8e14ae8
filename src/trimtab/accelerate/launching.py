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
    """Call a function on several processes of this host, or here if it is one.

    Args:
        function: It makes its own `Accelerator`.
        args: Its arguments.
        num_processes: How many; one if left out.
        mixed_precision: Only "no": the function says it to its `Accelerator`.
        use_port: Where the processes meet; a free one if left out.
        options: Of Accelerate's launcher; any that is not None is refused.

    Returns:
        What each process returned, in the order of ranks; of one process what it returned.
    """
    if mixed_precision != "no":
        raise RecipeError(
            f"notebook_launcher(mixed_precision={mixed_precision!r}) is not supported",
            f"Accelerator(mixed_precision={mixed_precision!r}) in the function",
        )
    refused = sorted(name for name, value in options.items() if value is not None)
    if refused:
        raise RecipeError(
            f"notebook_launcher({refused[0]}=…) is not supported", "trimtab launch, see docs/distributed.md"
        )
    if num_processes in (None, 1):
        return function(*args)
    assert num_processes is not None
    return launch(function, args, processes=num_processes, port=None if use_port is None else int(use_port))
