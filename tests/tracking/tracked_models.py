"""Runs and tiny models on a tracking server."""

import time
from pathlib import Path

from trimtab.checkpoint.export import export_model
from trimtab.model.hub import quiet_transformers
from trimtab.model.load import load_model, load_tokenizer
from trimtab.tracking.mlflow.best_model import log_best_model

TEXTS = ["the film was good", "a very long and dull story"]
CLASSIFIER, CAUSAL = "sequence-classification", "causal-lm"
THREE = {"num_labels": 3, "id2label": {0: "bad", 1: "fine", 2: "good"}, "label2id": {"bad": 0, "fine": 1, "good": 2}}


class TrackedModels:
    """Puts runs and models onto a server.

    Args:
        uri: Its address.
        files: Where experiments keep their files; None leaves that to the server.
    """

    def __init__(self, uri: str, files: Path | None = None) -> None:
        from mlflow import MlflowClient

        self.uri, self.client = uri, MlflowClient(uri)
        self._files = None if files is None else files.as_uri()

    def run(self, experiment: str, name: str, evaluations=(), **options) -> str:
        """A run with values of its evaluations, one mapping for each step."""
        found = self.client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self.client.create_experiment(experiment, self._files)
        run_id = self.client.create_run(number, run_name=name, **options).info.run_id
        for step, values in enumerate(evaluations):
            for key, value in values.items():
                self.client.log_metric(run_id, f"eval_{key}", value, step=step, timestamp=int(time.time() * 1000))
        return run_id

    def log(self, run_id: str, folder: Path, metric="accuracy", value=0.5, rises=True, register=None) -> str:
        return log_best_model(
            self.client, run_id, Path(folder), register=register, metric=metric, value=value, higher_is_better=rises
        )

    def files(self, address: str) -> Path:
        """Where the files of a logged model are."""
        return Path(self.client.get_logged_model(address.removeprefix("models:/")).artifact_location[len("file://") :])


def exported(folder: Path, source: str, kind: str, task: str, columns=None, metrics=None) -> Path:
    """The best model of a run, whole."""
    tok = load_tokenizer(source)
    model = load_model(source, kind, {}, tok)
    card = {"task": task, "max_length": 32, "step": 3, "metrics": metrics or {}, "columns": columns or {"text": "text"}}
    with quiet_transformers():
        return export_model(folder, model, tok, card=card)


def loud(tiny, head=THREE) -> str:
    """A classifier whose answers differ."""
    return tiny.folder("bert", kind=CLASSIFIER, head=head, initializer_range=0.5)


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}
