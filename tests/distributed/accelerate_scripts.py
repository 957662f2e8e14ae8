"""Every function of Accelerate's own test scripts, with the names that they import taken from `trimtab.accelerate`.

The scripts are `test_script`, `test_sync`, `test_distributed_data_loop`, `test_metrics` and `test_ops` of
`accelerate.test_utils.scripts`. Their `main` functions stop at the first failure and leave out some combinations on
the CPU; here each function is called by itself, with the arguments that `main` gives it.
"""

import importlib
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, default_collate

SCRIPTS = {
    "script": "accelerate.test_utils.scripts.test_script",
    "sync": "accelerate.test_utils.scripts.test_sync",
    "data": "accelerate.test_utils.scripts.test_distributed_data_loop",
    "metrics": "accelerate.test_utils.scripts.external_deps.test_metrics",
    "ops": "accelerate.test_utils.scripts.test_ops",
}


@dataclass(frozen=True)
class Case:
    """One call of one function."""

    name: str
    run: Callable[[], Any]
    num_processes: tuple[int, ...] = (1, 2)


def load_scripts(replacements: ModuleType) -> SimpleNamespace:
    """The scripts and their helpers, with every name that `replacements` exports put in the place of Accelerate's."""
    sys.modules.setdefault("evaluate", _metric_library())  # not a dependency of ours; one script imports it
    importlib.import_module("accelerate.test_utils.testing")
    loaded = {short: importlib.import_module(name) for short, name in SCRIPTS.items()}
    for module in (*loaded.values(), sys.modules["accelerate.test_utils.testing"]):
        for name in replacements.__all__:
            if hasattr(module, name):
                setattr(module, name, getattr(replacements, name))
    _use_tiny_models(loaded["metrics"])
    return SimpleNamespace(**loaded)


def cases_of(s: SimpleNamespace) -> list[Case]:
    """All functions of the scripts."""
    return [
        *_cases_of_script(s.script),
        *_cases_of_sync(s.sync),
        *_cases_of_data(s.data),
        *_cases_of_metrics(s.metrics),
    ] + [
        Case(f"ops.{name}", partial(_with_partial_state, s.ops, name))
        for name in vars(s.ops)
        if name.startswith("test_")
    ]


def _cases_of_script(script: ModuleType) -> list[Case]:
    import datasets

    plain = ["process_execution_check", "init_state_check", "rng_sync_check", "dl_preparation_check"]
    plain += ["central_dl_preparation_check", "custom_sampler_check", "check_seedable_sampler"]
    plain += ["check_seedable_sampler_with_data_seed", "test_trigger", "test_reinstantiated_state"]
    plain += [f"test_split_between_processes_{kind}" for kind in ("list", "nested_dict", "tensor", "evenly")]
    split_dataset = partial(script.test_split_between_processes_dataset, datasets.Dataset)
    return [
        *(Case(f"script.{name}", getattr(script, name)) for name in plain),
        Case("script.test_split_between_processes_dataset", split_dataset),
        Case("script.training_check", script.training_check),
        Case("script.training_check use_seedable_sampler", partial(script.training_check, use_seedable_sampler=True)),
        Case(
            "script.check_seedable_sampler_in_batch_sampler_shard",
            script.check_seedable_sampler_in_batch_sampler_shard,
            (2,),
        ),
    ]


def _cases_of_sync(sync: ModuleType) -> list[Case]:
    cases = [
        Case("sync.test_dataloader_break", sync.test_dataloader_break),
        Case("sync.test_noop_sync", lambda: sync.test_noop_sync(sync.Accelerator()), (1,)),
        Case("sync.test_distributed_sync", lambda: sync.test_distributed_sync(sync.Accelerator()), (2,)),
        Case(
            "sync.test_distributed_sync_multiple_fwd",
            lambda: sync.test_distributed_sync_multiple_fwd(sync.Accelerator()),
            (2,),
        ),
    ]
    for options in product((False, True), repeat=3):
        words = _words(zip(("split_batches", "dispatch_batches", "sync_each_batch"), options, strict=True))
        # on one process its gradients are "in sync" always, which the first of the two takes for a mistake
        run = partial(sync.test_gradient_accumulation, *options)
        cases.append(Case(f"sync.test_gradient_accumulation{words}", run, (2,)))
        run = partial(sync.test_gradient_accumulation_with_opt_and_scheduler, *options)
        cases.append(Case(f"sync.test_gradient_accumulation_with_opt_and_scheduler{words}", run))
    return cases


def _cases_of_data(data: ModuleType) -> list[Case]:
    needs_two = [
        "test_default_ensures_even_batch_sizes",
        "test_can_disable_even_batches",
        "test_can_join_uneven_inputs",
    ]
    needs_two += ["test_join_can_override_even_batches", "test_join_can_override_for_mixed_type_dataloaders"]
    needs_two += ["test_join_raises_warning_for_iterable_when_overriding_even_batches", "test_pickle_accelerator"]
    dataset = data.DummyDataset()

    def loader(**options: Any) -> DataLoader[Any]:
        return DataLoader(dataset, **options)  # without workers: they cost a second and change nothing here

    def sampler() -> BatchSampler:
        return BatchSampler(RandomSampler(dataset), batch_size=data.BATCH_SIZE, drop_last=False)

    loaders = {
        "": lambda: loader(batch_size=data.BATCH_SIZE),
        " shuffle": lambda: loader(batch_size=data.BATCH_SIZE, shuffle=True),
        " batch_sampler": lambda: loader(batch_sampler=sampler()),
        " sampler of batches": lambda: loader(sampler=sampler(), batch_size=None, collate_fn=default_collate),
    }
    return [
        *(Case(f"data.{name}", partial(_recording_warnings, getattr(data, name)), (2,)) for name in needs_two),
        Case("data.test_join_raises_warning_for_non_ddp_distributed", partial(_joins_without_ddp, data), (2,)),
        *(
            Case(f"data.test_data_loader{words}", lambda make=make: data.test_data_loader(make(), data.Accelerator()))
            for words, make in loaders.items()
        ),
        Case("data.test_stateful_dataloader", lambda: data.test_stateful_dataloader(data.Accelerator())),
        Case(
            "data.test_stateful_dataloader_save_state",
            lambda: data.test_stateful_dataloader_save_state(data.Accelerator()),
        ),
    ]


def _cases_of_metrics(metrics: ModuleType) -> list[Case]:
    cases = [
        Case(f"metrics.{name}", getattr(metrics, name))
        for name in (
            "test_gather_for_metrics_with_non_tensor_objects_iterable_dataset",
            "test_gather_for_metrics_with_iterable_dataset",
            "test_gather_for_metrics_drop_last",
        )
    ]
    cases.append(Case("metrics.test_torch_metrics 512", lambda: metrics.test_torch_metrics(metrics.Accelerator(), 512)))
    for options in product((False, True), repeat=2):
        named = dict(zip(("dispatch_batches", "split_batches"), options, strict=True))
        words = _words(named.items())
        cases.append(Case(f"metrics.test_torch_metrics 99{words}", partial(_torch_metrics, metrics, named)))
        cases.append(Case(f"metrics.test_mrpc{words}", partial(metrics.test_mrpc, **named)))
    return cases


def _words(options: Any) -> str:
    return "".join(f" {name}" for name, is_on in options if is_on)


def _torch_metrics(metrics: ModuleType, options: dict[str, bool]) -> None:
    accelerator = metrics.Accelerator(dataloader_config=metrics.DataLoaderConfiguration(**options))
    metrics.test_torch_metrics(accelerator, 99)


def _with_partial_state(ops: ModuleType, name: str) -> None:
    getattr(ops, name)(ops.PartialState())


def _recording_warnings(run: Callable[[], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        run()


def _joins_without_ddp(data: ModuleType) -> None:
    """As in the script's `main`: with the state set to a type that has no DDP."""
    accelerator = data.Accelerator()
    usual, accelerator.state.distributed_type = accelerator.state.distributed_type, data.DistributedType.FSDP
    try:
        _recording_warnings(partial(data.test_join_raises_warning_for_non_ddp_distributed, accelerator))
    finally:
        accelerator.state.distributed_type = usual


# ---------------------------------------------------------------------- what cannot be downloaded


class _Accuracy:
    """Stands for the metric of a library that is not installed: counts, and the scores that the script compares."""

    def __init__(self) -> None:
        self._pairs: list[tuple[int, int]] = []

    def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        self._pairs += zip(predictions.tolist(), references.tolist(), strict=True)

    def compute(self) -> dict[str, float]:
        pairs, self._pairs = self._pairs, []
        both = sum(p == r == 1 for p, r in pairs)
        return {
            "accuracy": sum(p == r for p, r in pairs) / len(pairs),
            "f1": 2 * both / max(sum(p for p, _ in pairs) + sum(r for _, r in pairs), 1),
        }


def _metric_library() -> ModuleType:
    library = ModuleType("evaluate")
    library.load = lambda *names: _Accuracy()  # type: ignore[attr-defined]
    return library


def _use_tiny_models(metrics: ModuleType) -> None:
    """A model and sentences made here: the script would download them."""
    from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}

    def model(*names: str, **options: Any) -> Any:
        torch.manual_seed(0)
        return BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=16, **sizes))

    def loader(accelerator: Any, use_longest: bool = False) -> DataLoader[Any]:
        words = torch.randint(1, 50, (37, 8), generator=torch.Generator().manual_seed(0))
        rows = [{"input_ids": row, "labels": torch.tensor(int(row[0]) % 2)} for row in words]
        return DataLoader(rows, batch_size=16, collate_fn=lambda batch: BatchEncoding(default_collate(batch)))

    metrics.AutoModelForSequenceClassification = SimpleNamespace(from_pretrained=model)
    metrics.get_dataloader = loader


# ---------------------------------------------------------------------- running


def run_all(folder: Path, replacements: ModuleType, only: str = "") -> dict[str, str]:
    """The outcome of each case, "" for a pass; every process writes its own to the folder."""
    rank, num_processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    outcomes: dict[str, str] = {}
    scripts = load_scripts(replacements)
    cases = cases_of(scripts)
    _require_all(scripts, cases)
    for case in cases:
        if num_processes in case.num_processes and case.name.startswith(only):
            torch.manual_seed(0)
            with tempfile.TemporaryDirectory() as work:
                os.chdir(folder if num_processes > 1 else work)
                try:
                    case.run()
                    outcomes[case.name] = ""
                except (Exception, pytest.fail.Exception) as error:
                    outcomes[case.name] = f"{type(error).__name__}: {error}"
                    if only:
                        traceback.print_exc()
                os.chdir(folder)
            (folder / f"outcomes-{rank}.json").write_text(json.dumps(outcomes))
    return outcomes


def main(folder: Path) -> None:
    """What each process does."""
    run_all(folder, importlib.import_module("trimtab.accelerate"))


def _require_all(scripts: SimpleNamespace, cases: list[Case]) -> None:
    """A function that a new version of Accelerate adds is not left out in silence."""
    called = {case.name.partition(" ")[0] for case in cases}
    for short, script in vars(scripts).items():
        own = [name for name, value in vars(script).items() if getattr(value, "__module__", "") == SCRIPTS[short]]
        tests = {name for name in own if name.startswith(("test_", "check_")) or name.endswith("_check")}
        tests -= {"check_model_parameters"}  # others call it
        assert {f"{short}.{name}" for name in tests} <= called, tests
