"""Datasets of the `datasets` library to `Rows`: objects of it, folders that it saved, and names on the hub."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimtab.data.rows import Rows
from trimtab.errors import DataError

_HUB_CURE = (
    "check the name (imdb, imdb:test, glue/mrpc:train[:200]) and the connection; with none, or with HF_HUB_OFFLINE=1, "
    "only datasets that were downloaded before can be used, or files such as reviews.csv"
)


def is_dataset(source: Any) -> bool:
    """Whether an object is of the `datasets` library, without importing it."""
    datasets = sys.modules.get("datasets")
    kinds = ("Dataset", "DatasetDict", "IterableDataset", "IterableDatasetDict")
    return datasets is not None and isinstance(source, tuple(getattr(datasets, kind) for kind in kinds))


def label_names(features: Any) -> dict[str, list[str]]:
    """Column to class names, for single labels and lists of them."""
    names = {}
    for column, feature in (features or {}).items():
        inner = getattr(feature, "feature", feature)
        if hasattr(inner, "names") and hasattr(inner, "int2str"):
            names[column] = list(inner.names)
    return names


def pick_split(dataset: Any, split: str | None, origin: str) -> Any:
    """One split of what was loaded: the one named, else the only one, else "train"."""
    if not hasattr(dataset, "keys"):
        if split is not None and str(dataset.split) != split:
            raise DataError(f"{origin} has no splits, but {split!r} was asked for", f"write {origin} alone")
        return dataset
    splits = list(dataset.keys())
    chosen = split or (splits[0] if len(splits) == 1 else "train")
    if chosen not in splits:
        found = f"no split {chosen!r}" if split else "several splits and none is called train"
        raise DataError(f"{origin} has {found}", f"choose one of its splits: {', '.join(splits)}")
    return dataset[chosen]


def is_saved(folder: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file()


def load_saved(folder: Path) -> Any:
    """What `save_to_disk` wrote."""
    import datasets

    try:
        return datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{folder} cannot be loaded: {_first_line(error)}", "write it again with save_to_disk"
        ) from error


def load_from_hub(name: str) -> Any:
    """All splits of "imdb", "owner/name", "glue/mrpc" (name and configuration) or "owner/name/configuration".

    Raises:
        DataError: If it cannot be had, with what the hub said.
    """
    import datasets

    return _first_that_works(name, datasets.load_dataset)


def find_on_hub(name: str) -> None:
    """See that a dataset is there; its description is fetched, its rows are not.

    Raises:
        DataError: If it cannot be had, with what the hub said.
    """
    import datasets

    _first_that_works(name, datasets.load_dataset_builder)


def _first_that_works(name: str, load: Callable[..., Any]) -> Any:
    """What `load` gives for a name that may end in a configuration."""
    import datasets

    parts = name.split("/")
    attempts: list[list[str]] = [[name]] if len(parts) < 3 else [["/".join(parts[:2]), parts[2]]]
    if len(parts) == 2:
        attempts.append(parts)  # no owner but a configuration, as in glue/mrpc
    reasons: list[str] = []
    for attempt in attempts:
        try:
            return load(*attempt)
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            _explain(name, attempt[0], error)
            reasons.append(_first_line(error))
    raise DataError(
        f"{name!r} is no file or folder here, and no dataset could be loaded: {'; '.join(reasons)}", _HUB_CURE
    )


def _explain(name: str, repository: str, error: Exception) -> None:
    """Raise at once for what another reading of the name cannot mend."""
    said = str(error)
    if "gated" in said.lower():
        cure = f"ask for access on the page of {repository} on the Hub, then log in: hf auth login"
        raise DataError(f"the dataset {name!r} is gated: {_first_line(error)}", cure) from error
    if "Config name is missing" in said or "BuilderConfig" in said:
        raise DataError(f"the dataset {name!r} has configurations: {said}", f"write {repository}/NAME") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def rows_of_dataset(dataset: Any, origin: str) -> Rows:
    """A `datasets.Dataset` as `Rows`, with the names of its class labels."""
    plain = dataset.with_format(None)
    return Rows(dict(plain[:]), origin, label_names(plain.features))
