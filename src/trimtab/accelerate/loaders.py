"""`prepare_data_loader` and `skip_first_batches` without an engine."""

from typing import Any

import torch
from torch.utils.data import DataLoader

from trimtab.accelerate.shared_state import PartialState
from trimtab.engine.loader_setup import prepare_loader
from trimtab.engine.placement import placement_for
from trimtab.engine.prepared_loader import ActiveLoaders, PreparedLoader
from trimtab.engine.sharding import LoaderRules
from trimtab.errors import PrepareError


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[str] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Any = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> PreparedLoader:
    """Return a loader that delivers this process's batches, as `Accelerator.prepare` does."""
    state = PartialState()
    own = (state.num_processes, state.process_index)
    asked = (
        num_processes if num_processes is not None else own[0],
        process_index if process_index is not None else own[1],
    )
    if asked != own:
        raise PrepareError(
            f"num_processes={asked[0]} and process_index={asked[1]}, but this is process {own[1]} of {own[0]}",
            "leave both out",
        )
    unusual_rng_types = None if set(rng_types or ()) <= {"generator"} else rng_types
    for name, value in (
        ("slice_fn_for_dispatch", slice_fn_for_dispatch),
        ("torch_device_mesh", torch_device_mesh),
        (f"rng_types={rng_types}", unusual_rng_types),
    ):
        if value is not None:
            raise PrepareError(f"{name} is not supported", "leave it out")
    if dispatch_batches and not put_on_device:
        raise PrepareError("dispatch_batches=True without put_on_device=True is not supported", "put_on_device=True")
    rules = LoaderRules(
        splits=split_batches,
        as_accelerate=True,
        is_even=even_batches,
        dispatches=dispatch_batches if put_on_device else False,
        is_seedable=use_seedable_sampler,
        data_seed=data_seed,
    )
    place = placement_for((device or state.device) if put_on_device else torch.device("cpu"))
    return prepare_loader(dataloader, place, ActiveLoaders(), state.world, rules)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> PreparedLoader:
    """Make the next iteration of a loader start after `num_batches` batches."""
    loader = dataloader if isinstance(dataloader, PreparedLoader) else prepare_data_loader(dataloader)
    loader.start_at(num_batches)
    return loader
