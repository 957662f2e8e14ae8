"""Convert datasets of the `datasets` library to `Rows`: objects, folders of `save_to_disk`, names on the Hub."""

import sys
from pathlib import Path
from typing import Any

from trimtab.data.rows import Rows
from trimtab.errors import DataError

_HUB_CURE = (
    "check the name (imdb, imdb:test, glue/mrpc:train[:200]) and the connection; offline or with HF_HUB_OFFLINE=1, use "
    "a dataset that was downloaded before, or a file such as reviews.csv"
)
# `datasets` would read all files of the current directory with these loaders
_FORMAT_NAMES = {
    *("arrow", "audiofolder", "conll", "csv", "eval", "fasta", "fastq", "genbank", "generator", "harbor", "hdf5"),
    *("iceberg", "imagefolder", "json", "lance", "meshfolder", "mmcif", "niftifolder", "pandas", "parquet", "pdb"),
    *("pdffolder", "spark", "sql", "text", "tsfile", "videofolder", "vortex", "webdataset", "xml"),
}
_USUAL_SPLITS = {"train": ("train",), "eval": ("validation", "valid", "dev", "eval", "test")}


def is_dataset(source: Any) -> bool:
    """Whether an object is of the `datasets` library, without importing it."""
    datasets = sys.modules.get("datasets")
    kinds = ("Dataset", "DatasetDict", "IterableDataset", "IterableDatasetDict")
    return datasets is not None and isinstance(source, tuple(getattr(datasets, kind) for kind in kinds))


def label_names(features: Any) -> dict[str, list[str]]:
    """Return column to class names, for columns of ClassLabel and of lists of ClassLabel."""
    names = {}
    for column, feature in (features or {}).items():
        inner = getattr(feature, "feature", feature)
        if hasattr(inner, "names") and hasattr(inner, "int2str"):
            names[column] = list(inner.names)
    return names


def usual_split(dataset: Any, role: str) -> str | None:
    """Return the name of the split of a dataset for a role: "train" or "eval"."""
    return next((name for name in _USUAL_SPLITS[role] if name in dataset), None)


def pick_split(dataset: Any, split: str | None, origin: str, role: str) -> Any:
    """Return one split of a dataset: the named one, else the only one, else the usual one of a role."""
    if not hasattr(dataset, "keys"):
        if split is not None and str(dataset.split) != split:
            raise DataError(f"{origin} has no splits, but {split!r} was requested", f"write {origin} without a split")
        return dataset
    splits = list(dataset.keys())
    chosen = split or (splits[0] if len(splits) == 1 else usual_split(dataset, role))
    if chosen not in splits:
        found = f"no split {chosen!r}" if split else f"several splits, none named {' or '.join(_USUAL_SPLITS[role])}"
        raise DataError(f"{origin} has {found}", f"choose one of its splits: {', '.join(splits)}")
    return dataset[chosen]


def is_saved(folder: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file()


def load_saved(folder: Path) -> Any:
    """Load a folder that `save_to_disk` wrote."""
    import datasets

    try:
        return datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{folder} cannot be loaded: {_first_line(error)}", "write it again with save_to_disk"
        ) from error


def load_from_hub(name: str, *, rows: bool = True) -> Any:
    """Load all splits of "imdb", "owner/name", "glue/mrpc" (name and configuration) or "owner/name/configuration".

    Args:
        name: The name.
        rows: Whether to load rows; otherwise only the description is fetched, to check that the dataset exists.

    Raises:
        DataError: If it cannot be loaded, with the error of the Hub.
    """
    import datasets

    if name in _FORMAT_NAMES:
        raise DataError(
            f"{name!r} is the name of a file format, not of a dataset",
            f"name the file or folder: data.{name}, ./{name}",
        )
    load = datasets.load_dataset if rows else datasets.load_dataset_builder
    parts = name.split("/")
    attempts: list[list[str]] = [[name]] if len(parts) < 3 else [["/".join(parts[:2]), parts[2]]]
    if len(parts) == 2:
        attempts.append(parts)  # name and configuration without an owner, as in glue/mrpc
    reasons: list[str] = []
    for attempt in attempts:
        try:
            return load(*attempt)
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            _raise_if_final(name, attempt[0], error)
            reasons.append(_first_line(error))
    raise DataError(
        f"{name!r} is not a local file or folder, and cannot be loaded from the Hub: {'; '.join(reasons)}", _HUB_CURE
    )


def _raise_if_final(name: str, repository: str, error: Exception) -> None:
    """Raise errors that another reading of the name cannot fix."""
    message = str(error)
    if "gated" in message.lower():
        cure = f"request access on the page of {repository} on the Hub, then log in: hf auth login"
        raise DataError(f"the dataset {name!r} is gated: {_first_line(error)}", cure) from error
    if "Config name is missing" in message or "BuilderConfig" in message:
        raise DataError(f"the dataset {name!r} has configurations: {message}", f"write {repository}/NAME") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def rows_of_dataset(dataset: Any, origin: str) -> Rows:
    """Convert a `datasets.Dataset` to `Rows`, with the names of its class labels."""
    plain = dataset.with_format(None)
    return Rows(dict(plain[:]), origin, label_names(plain.features))
