"""Loader for models that MLflow's own flavours cannot load; MLflow imports this module by its name.

Logged models store that name: do not rename the module. `trimtab.tracking.mlflow.model_folder` decides which models
need it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.errors import DataError
from trimtab.inference.classify import classify_texts, regress_texts
from trimtab.inference.generate import generate_texts
from trimtab.inference.load import LoadedModel, load
from trimtab.tracking.mlflow.model_folder import MODEL

_PAIR = ("text", "text_pair")


class Served:
    """A pyfunc model: a table of texts to a table of labels and scores, or to a list of generated texts.

    Args:
        loaded: The model.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def predict(self, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Predict for every row.

        Args:
            data: A data frame with one column of texts, or with the columns `text` and `text_pair`; or a list.
            params: max_new_tokens, for a model that generates text.
        """
        import pandas  # type: ignore[import-untyped]

        texts = _texts(data)
        task = self._loaded.task_name
        if task == "classify":
            found = classify_texts(self._loaded, texts)
            labels = [one.label if isinstance(one.label, str) else "; ".join(one.label) for one in found]
            return pandas.DataFrame({"label": labels, "score": [one.score for one in found]})
        if task == "regress":
            values = regress_texts(self._loaded, texts)
            return pandas.DataFrame({"label": "value", "score": values})
        return generate_texts(self._loaded, texts, int((params or {}).get("max_new_tokens", 128)))


def _texts(data: Any) -> list[Any]:
    if isinstance(data, str):
        return [data]
    if not hasattr(data, "columns"):
        return list(data)
    if set(_PAIR) <= set(data.columns):
        return list(zip(data[_PAIR[0]], data[_PAIR[1]], strict=True))
    if len(data.columns) != 1:
        raise DataError(
            f"the columns are {', '.join(map(str, data.columns))}",
            "send one column of texts, or the columns text and text_pair",
        )
    return [str(text) for text in data.iloc[:, 0]]


def _load_pyfunc(path: str) -> Served:
    """Load the model; MLflow calls this function with the folder of the logged model."""
    return Served(load(Path(path) / MODEL))
