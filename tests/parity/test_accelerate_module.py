"""`trimtab.accelerate`: the names that scripts import, what they give, and what they refuse with a cure."""

import importlib
import inspect
import logging
import os
import pickle
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers import BatchEncoding
from transformers.modeling_outputs import SequenceClassifierOutput

import trimtab.accelerate
from trimtab import Engine
from trimtab.accelerate import (
    Accelerator,
    AcceleratorState,
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradientState,
    PartialState,
    ProfileKwargs,
    ProjectConfiguration,
    concatenate,
    find_executable_batch_size,
    gather,
    gather_object,
    get_logger,
    notebook_launcher,
    prepare_data_loader,
    reduce,
    release_memory,
    send_to_device,
    set_seed,
    skip_first_batches,
    synchronize_rng_states,
)
from trimtab.accelerate.shared_state import forget
from trimtab.engine.accelerate_verbs import UNSUPPORTED
from trimtab.errors import DoesNotFit, PrepareError, RecipeError


@pytest.fixture(autouse=True)
def _no_engine_before():
    forget()
    yield
    forget()


def slope(num_rows, batch_size=1, kind=Accelerator, **settings):
    """One weight whose gradient is the mean of the rows of a window."""
    accelerator = kind(cpu=True, **settings)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(torch.arange(1.0, num_rows + 1)[:, None]), batch_size)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


# ---------------------------------------------------------------------- names


def test_every_exported_name_is_there_and_one_that_is_not_says_where_it_is():
    for name in trimtab.accelerate.__all__:
        assert getattr(trimtab.accelerate, name) is not None
    with pytest.raises(ImportError, match=r"no load_fsdp_model\n  cure: .*pip install accelerate"):
        from trimtab.accelerate.utils import load_fsdp_model  # noqa: F401
    with pytest.raises(ImportError, match="no LocalSGD\n  cure: use .*gradient_accumulation_steps"):
        from trimtab.accelerate.local_sgd import LocalSGD  # noqa: F401


def test_every_way_to_name_a_module():
    import trimtab.accelerate.utils as module

    from trimtab.accelerate import utils

    assert module is utils is trimtab.accelerate.utils is trimtab.accelerate
    for name in ("utils.operations", "utils.dataclasses", "state", "logging", "data_loader"):
        assert importlib.import_module(f"trimtab.accelerate.{name}") is trimtab.accelerate
    assert trimtab.accelerate.utils.set_seed is set_seed
    assert not hasattr(trimtab.accelerate, "no_such_name")


def test_names_that_scripts_use_are_there(monkeypatch):
    from trimtab.accelerate.hooks import AlignDevicesHook  # noqa: F401
    from trimtab.accelerate.utils import DDPCommunicationHookType, is_peft_model, patch_environment, tqdm

    assert trimtab.accelerate.__version__ == pytest.importorskip("accelerate").__version__
    assert not trimtab.accelerate.state.is_initialized()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert trimtab.accelerate.state.is_initialized()
    assert accelerator.native_amp
    accelerator.native_amp = False
    with accelerator.autocast():
        assert accelerator.prepare(torch.nn.Linear(1, 1))(torch.ones(1)).dtype is torch.float32
        assert not torch.is_autocast_enabled("cpu")
    assert list(tqdm(range(2), disable=True)) == [0, 1]
    assert not is_peft_model(torch.nn.Linear(1, 1))
    monkeypatch.delenv("SOME_NAME", raising=False)
    with patch_environment(some_name=3):
        assert os.environ["SOME_NAME"] == "3"
    assert "SOME_NAME" not in os.environ
    refused = trimtab.accelerate.DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    with pytest.raises(RecipeError, match="comm_hook is not supported"):
        Accelerator(cpu=True, kwargs_handlers=[refused])


def test_every_verb_and_argument_of_accelerate_is_known():
    accelerate = pytest.importorskip("accelerate")
    ours = Accelerator(cpu=True)
    verbs = {name for name in dir(accelerate.Accelerator) if not name.startswith("_")}
    assert not {name for name in verbs if not hasattr(ours, name)} - set(UNSUPPORTED)
    asked = set(inspect.signature(accelerate.Accelerator).parameters)
    assert asked <= set(inspect.signature(Accelerator).parameters)
    assert trimtab.accelerate.is_bf16_available is accelerate.utils.is_bf16_available
    for name in ("DataLoaderConfiguration", "GradientAccumulationPlugin", "ProjectConfiguration", "GradScalerKwargs"):
        theirs, own = getattr(accelerate.utils, name)(), getattr(trimtab.accelerate, name)()
        assert vars(own) == {key: value for key, value in vars(theirs).items() if not key.startswith("_")}


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_a_verb_that_there_is_not_names_its_cure(name):
    with pytest.raises(AttributeError, match=rf"{name} is not supported\n  cure: ") as caught:
        getattr(Engine(cpu=True), name)
    assert UNSUPPORTED[name] in str(caught.value)


def test_a_misspelt_verb_is_an_ordinary_mistake():
    with pytest.raises(AttributeError, match="'Engine' object has no attribute 'preprae'"):
        Engine(cpu=True).preprae()


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fsdp_plugin": object()}, "fsdp_plugin is not supported\n  cure: leave it out; Engine.memory_budget"),
        ({"deepspeed_plugin": object()}, "deepspeed_plugin is not supported"),
        ({"megatron_lm_plugin": object()}, "megatron_lm_plugin is not supported"),
        ({"parallelism_config": object()}, "parallelism_config is not supported"),
        ({"dynamo_backend": "inductor"}, "dynamo_backend is not supported\n  cure: .*torch.compile"),
        ({"rng_types": ["torch", "generator"]}, "rng_types=.*not supported\n  cure: .*synchronize_rng_states"),
        ({"mixed_precision": "fp8"}, 'fp8" is not supported\n  cure: mixed_precision="bf16"'),
        ({"project_config": ProjectConfiguration(save_on_each_node=True)}, "save_on_each_node=True is not supported"),
        ({"kwargs_handlers": [AutocastKwargs(enabled=False)]}, "AutocastKwargs.enabled=False is not supported"),
        ({"dataloader_config": {"split_batches": True}}, "dataloader_config is a dict"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused_by_name(settings, words):
    with pytest.raises(RecipeError, match=words):
        Accelerator(cpu=True, **settings)


def test_usual_settings_are_no_reason_to_refuse(tmp_path):
    accelerator = Accelerator(cpu=True, dynamo_backend="no", rng_types=["generator"], project_dir=tmp_path)
    assert accelerator.logging_dir == accelerator.project_dir == tmp_path
    config = ProjectConfiguration(logging_dir=tmp_path)
    assert Accelerator(cpu=True, project_config=config).logging_dir == tmp_path
    config = ProjectConfiguration(tmp_path, logging_dir=tmp_path / "logs", total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=config, kwargs_handlers=[AutocastKwargs()])
    assert (accelerator.project_dir, accelerator.logging_dir) == (tmp_path, tmp_path / "logs")
    model, none = accelerator.prepare(torch.nn.Linear(1, 1), None)
    assert none is None
    assert accelerator.prepare(model) is model


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ACCELERATE_USE_FSDP", "true", "without --use_fsdp"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "without --use_deepspeed"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "torch.compile"),
    ],
)
def test_what_accelerate_launch_was_told_is_not_ignored(monkeypatch, name, value, words):
    monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match=words):
        Accelerator(cpu=True)


def test_what_accelerate_launch_was_told_counts(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    accelerator = Accelerator()
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 3)
    assert accelerator.device.type == "cpu"
    accelerator = Accelerator(mixed_precision="no")
    assert (accelerator.mixed_precision, accelerator.scaler) == ("no", None)


def test_arguments_of_verbs_that_cannot_be_honoured_are_refused(tmp_path):
    accelerator = Accelerator(cpu=True, log_with="journal", project_dir=tmp_path)
    model = torch.nn.Linear(1, 1)
    for call in (
        lambda: accelerator.save_state(),
        lambda: accelerator.save_state(tmp_path, safe_serialization=False),
        lambda: accelerator.load_state(),
        lambda: accelerator.load_state(tmp_path, load_kwargs={"map_location": "cpu"}),
        lambda: accelerator.save_model(model, tmp_path, max_shard_size="1GB"),
        lambda: accelerator.save_model(model, tmp_path, safe_serialization=False),
        lambda: accelerator.prepare_model(model, evaluation_mode=True),
        lambda: accelerator.prepare_data_loader(DataLoader([1]), slice_fn_for_dispatch=len),
        lambda: accelerator.get_tracker("journal", unwrap=True),
        lambda: notebook_launcher(print, mixed_precision="bf16"),
        lambda: notebook_launcher(print, node_rank=1),
    ):
        with pytest.raises(RecipeError, match=r"not supported.*\n  cure: "):
            call()


# ---------------------------------------------------------------------- windows, batches, order


def test_a_window_cut_short_is_divided_by_the_full_length_and_by_its_own_in_an_engine():
    ends = {}
    for kind in (Accelerator, Engine):
        engine, model, optimizer, loader = slope(3, kind=kind, gradient_accumulation_steps=2)
        for (row,) in loader:
            with engine.accumulate(model):
                engine.backward(model(row).mean())
                optimizer.step()
                optimizer.zero_grad()
        ends[kind] = model.weight.item()
    assert ends == {Accelerator: -(1.5 + 3 / 2), Engine: -(1.5 + 3)}


def test_windows_can_go_on_in_the_next_epoch():
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator, model, optimizer, loader = slope(3, gradient_accumulation_plugin=plugin)
    ends = []
    for _ in range(2):
        for (row,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(row).mean())
                optimizer.step()
                optimizer.zero_grad()
            ends.append(accelerator.gradient_state.sync_gradients)
    assert ends == [False, True] * 3
    assert model.weight.item() == -(1.5 + (3 + 1) / 2 + 2.5)
    assert not accelerator.gradient_state.sync_with_dataloader


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("num_skipped", [None, 3, 2])
def test_a_state_saved_in_an_open_window_resumes_there_or_at_its_start(tmp_path, num_skipped, by_hand):
    """A script that goes back to the start of the window repeats its batches: the saved gradients are dropped."""

    def trained(save_after=None, resume_at=0):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1 if by_hand else 2)
        model = torch.nn.Linear(2, 1)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = torch.arange(12.0).reshape(6, 2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=1))
        if resume_at:
            accelerator.load_state(tmp_path / "state")
            if num_skipped is not None:
                loader = accelerator.skip_first_batches(loader, num_skipped)
        for number, batch in enumerate(loader, resume_at + 1):
            with nullcontext() if by_hand else accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                if number == save_after:
                    kept = model.weight.grad
                    accelerator.save_state(tmp_path / "state")
                    assert model.weight.grad is kept
                if not by_hand or number % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        return model.weight

    undisturbed = trained()
    assert torch.equal(trained(save_after=3), undisturbed)
    assert torch.equal(trained(resume_at=num_skipped or 3), undisturbed)


def test_hooks_write_and_read_their_own_files_beside_the_state(tmp_path):
    """As diffusers' scripts save a model of several parts: they write its folder, and pop its weights."""
    accelerator, model, *_ = slope(num_rows=1)
    called = []

    def save(models, weights, folder):
        assert weights.pop().keys() == models[0].state_dict().keys()
        Path(folder, "part").mkdir()
        Path(folder, "part", "model.safetensors").write_text("mine")

    def load(models, folder):
        called.append(Path(folder, "part", "model.safetensors").read_text())
        models.pop()

    accelerator.register_save_state_pre_hook(save)
    handle = accelerator.register_load_state_pre_hook(load)
    for _ in range(2):  # the second replaces the first
        accelerator.save_state(tmp_path / "state")
        with torch.no_grad():
            model.weight.fill_(3.0)
        accelerator.load_state(tmp_path / "state")
        assert model.weight.item() == 0.0
    handle.remove()
    accelerator.load_state(tmp_path / "state")
    assert called == ["mine", "mine"]
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_folders_are_named_and_the_oldest_are_deleted(tmp_path):
    config = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=config)
    progress = torch.nn.Linear(1, 1)
    accelerator.register_for_checkpointing(progress)
    with pytest.raises(RecipeError, match="pass one"):
        accelerator.load_state()
    for number in range(11):
        torch.nn.init.constant_(progress.bias, number)
        accelerator.save_state()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"checkpoint_9", "checkpoint_10"}
    assert accelerator.save_iteration == 11
    torch.nn.init.zeros_(progress.bias)
    accelerator.load_state()
    assert progress.bias.item() == 10
    config.iteration = 10
    with pytest.raises(RecipeError, match="checkpoint_10 already exists\n  cure: .*iteration="):
        accelerator.save_state()


def test_bf16_weights_end_as_with_accelerate():
    accelerate = pytest.importorskip("accelerate")
    ends = []
    for kind in (accelerate.Accelerator, Accelerator):
        torch.manual_seed(0)
        accelerator = kind(cpu=True, mixed_precision="bf16")
        model = torch.nn.Linear(4, 4).to(torch.bfloat16)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loss = model(torch.ones(2, 4)).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        ends.append((loss.detach(), model.weight.detach()))
    assert ends[1][1].dtype is torch.bfloat16
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_a_models_output_stays_one():
    accelerator = Accelerator(cpu=True)
    output = SequenceClassifierOutput(logits=torch.ones(2, 3))
    loader = accelerator.prepare(DataLoader(torch.arange(4), batch_size=2))
    for _ in loader:
        assert torch.equal(accelerator.gather_for_metrics(output).logits, output.logits)
        features = {"inner": BatchEncoding({"ids": torch.ones(2, 1)})}
        assert torch.equal(accelerator.gather_for_metrics(features)["inner"]["ids"], torch.ones(2, 1))


def test_a_seedable_order_follows_from_the_seed_and_the_epoch_and_resumes(tmp_path):
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5)

    def prepared():
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        return accelerator, accelerator.prepare(DataLoader(range(8), batch_size=2, shuffle=True))

    accelerator, loader = prepared()
    orders = [torch.cat(list(loader)).tolist() for _ in range(2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == list(range(8))
    torch.rand(3)
    accelerator, loader = prepared()
    rows = []
    for epoch in range(2):
        for batch in loader:
            rows.append(batch)
            if (epoch, len(rows)) == (1, 6):
                accelerator.save_state(tmp_path / "state")
    assert torch.cat(rows).tolist() == orders[0] + orders[1]
    accelerator, loader = prepared()
    accelerator.load_state(tmp_path / "state")
    assert torch.cat(list(loader)).tolist() == orders[1][4:]


def test_what_is_known_of_an_epoch_while_it_runs():
    accelerator, _, _, loader = slope(7, batch_size=2)
    view = accelerator.gradient_state
    assert view.active_dataloader is None
    assert (view.in_dataloader, view.end_of_dataloader, view.remainder) == (False, False, -1)
    ends = []
    for _ in loader:
        assert view.active_dataloader is loader
        ends.append(view.end_of_dataloader)
        assert view.remainder == 1
    assert ends == [False, False, False, True]
    assert (loader.total_batch_size, loader.total_dataset_length) == (2, 7)
    assert view.num_steps == 1


def test_a_config_given_later_counts_for_loaders_from_then_on():
    accelerator = Accelerator(cpu=True)
    assert accelerator.dataloader_config is None
    assert (accelerator.split_batches, accelerator.even_batches, accelerator.dispatch_batches) == (False, True, None)
    accelerator.dataloader_config = DataLoaderConfiguration(
        split_batches=True, even_batches=False, dispatch_batches=False, use_seedable_sampler=True
    )
    assert (accelerator.split_batches, accelerator.even_batches, accelerator.dispatch_batches) == (True, False, False)
    assert accelerator.use_seedable_sampler
    engine = Engine(cpu=True)
    assert (engine.split_batches, engine.dispatch_batches) == (True, False)


def test_loaders_without_an_engine():
    loader = prepare_data_loader(DataLoader(range(6), batch_size=2))
    assert [batch.tolist() for batch in skip_first_batches(loader, 1)] == [[2, 3], [4, 5]]
    assert [batch.tolist() for batch in skip_first_batches(DataLoader(range(4), batch_size=2), 1)] == [[2, 3]]
    with pytest.raises(PrepareError, match="this is process 0 of 1\n  cure: leave both out"):
        prepare_data_loader(DataLoader(range(6)), num_processes=2, process_index=1)
    with pytest.raises(PrepareError, match="put_on_device=True"):
        prepare_data_loader(DataLoader(range(6)), dispatch_batches=True)


def test_an_iterable_dataset_is_read_by_the_first_process():
    class Stream(IterableDataset):
        def __iter__(self):
            yield from range(5)

    loader = Accelerator(cpu=True).prepare(DataLoader(Stream(), batch_size=2))
    assert isinstance(loader, trimtab.accelerate.DataLoaderDispatcher)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


# ---------------------------------------------------------------------- state


def test_states_are_views_of_the_latest_accelerator():
    alone = PartialState()
    assert alone is PartialState()
    assert (alone.num_processes, alone.use_distributed) == (1, False)
    assert alone.is_main_process
    assert alone.is_last_process
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert AcceleratorState() is PartialState() is accelerator.state
    assert AcceleratorState().mixed_precision == "bf16"
    assert "Mixed precision type: bf16" in repr(accelerator.state)
    assert GradientState() is accelerator.gradient_state
    AcceleratorState._reset_state()
    assert AcceleratorState().mixed_precision == "no"
    assert accelerator.prepare(torch.nn.Linear(1, 1)) is not None, "an engine that exists works on"
    assert GradientState().sync_gradients


NAMED = {"cpu": True, "mixed_precision": "bf16", "gradient_accumulation_steps": 4, "seed": 3}


@pytest.mark.parametrize(("kind", "args", "settings"), [(Accelerator, (), NAMED), (Engine, ("bf16", 4, "cpu", 3), {})])
def test_an_engine_is_pickled_by_its_settings(kind, args, settings):
    engine = kind(*args, **settings)
    engine.prepare(torch.nn.Linear(1, 1))
    torch.manual_seed(99)
    expected = torch.rand(1)
    torch.manual_seed(99)
    again = pickle.loads(pickle.dumps(engine))
    assert torch.equal(torch.rand(1), expected), "nothing is seeded anew"
    assert type(again) is kind
    assert again.state.__dict__ == engine.state.__dict__
    assert (again.mixed_precision, again.gradient_accumulation_steps) == ("bf16", 4)


def test_functions_run_where_they_should():
    accelerator = Accelerator(cpu=True)
    for where in (accelerator, accelerator.state):
        assert where.on_last_process(lambda: 1)() == 1
        assert where.on_process(lambda: 1, process_index=0)() == 1
        assert where.on_process(lambda: 1, process_index=1)() is None
        assert where.on_process(process_index=0)(lambda: 1)() == 1
        assert where.on_local_process(local_process_index=1)(lambda: 1)() is None
        assert where.on_main_process(lambda: 1)() == where.on_local_main_process(lambda: 1)() == 1


def test_objects_are_saved_once(tmp_path):
    engine = Engine(cpu=True)
    engine.save({"a": 1}, tmp_path / "any.pt")
    assert torch.load(tmp_path / "any.pt") == {"a": 1}
    weight = torch.ones(2, 3)
    engine.save(
        {"one": weight, "tied": weight, "turned": weight.T}, tmp_path / "x.safetensors", safe_serialization=True
    )
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == {"one", "turned"}
    assert torch.equal(found["turned"], weight.T)


def test_joining_one_process_changes_nothing():
    accelerator, model, _, loader = slope(2)
    with accelerator.join_uneven_inputs([model], even_batches=False):
        assert len(list(loader)) == 2
    with accelerator.trigger_sync_in_backward(model):
        pass


# ---------------------------------------------------------------------- functions


def test_functions_over_one_process():
    assert gather(torch.ones(2)).tolist() == [1, 1]
    assert gather_object(["a"]) == ["a"]
    assert reduce(torch.tensor(3.0), "max").item() == 3
    synchronize_rng_states(["torch", "generator"], torch.Generator())
    with pytest.raises(ValueError, match="generator"):
        synchronize_rng_states(["generator"])
    moved = send_to_device({"a": torch.ones(1), "b": torch.ones(1)}, "meta", skip_keys="b")
    assert (moved["a"].device.type, moved["b"].device.type) == ("meta", "cpu")
    joined = concatenate([{"x": torch.zeros(1, 2), "names": ["a"]}, {"x": torch.ones(2, 2), "names": ["b", "c"]}])
    assert joined["x"].sum() == 4
    assert joined["names"] == ["a", "b", "c"]
    assert concatenate([torch.zeros(2, 1), torch.zeros(2, 2)], dim=1).shape == (2, 3)
    with pytest.raises(RecipeError, match="supports tensors only"):
        concatenate([{"a": torch.ones(1, 2)}] * 2, dim=1)
    model = torch.nn.Linear(1, 1)
    assert trimtab.accelerate.extract_model_from_parallel(model) is model
    with pytest.raises(RecipeError, match="removes the data-parallel wrapper only"):
        trimtab.accelerate.extract_model_from_parallel(model, keep_fp32_wrapper=False)
    assert release_memory(1, 2) == [None, None]
    assert notebook_launcher(lambda a, b: a + b, (1, 2)) == 3


def test_seeds():
    set_seed(3)
    first = torch.rand(1)
    set_seed(3, device_specific=True)
    assert torch.equal(torch.rand(1), first)


def test_batches_shrink_until_they_fit():
    tried = []

    @find_executable_batch_size(starting_batch_size=10)
    def train(batch_size, limit):
        tried.append(batch_size)
        if batch_size > limit:
            raise torch.OutOfMemoryError("out of memory")
        return batch_size

    assert train(8) == 8
    assert tried == [10, 9, 8]
    assert train(8) == 8
    assert tried == [10, 9, 8, 8], "what fitted is kept"
    with pytest.raises(DoesNotFit, match="reached zero"):
        train(0)
    with pytest.raises(TypeError, match=r"call it with \(limit\)"):
        train(1, 2)

    @find_executable_batch_size(starting_batch_size=4)
    def fails(batch_size):
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        fails()


def test_a_logger_for_several_processes(caplog):
    logger = get_logger("own")
    with caplog.at_level(logging.INFO):
        logger.info("for %s", "all", main_process_only=False)
        logger.info("in order", in_order=True)
        logger.warning_once("once")
        logger.warning_once("once")
        logger.debug("muted")
    assert [record.getMessage() for record in caplog.records] == ["for all", "in order", "once"]
    assert {record.filename for record in caplog.records} == {"test_accelerate_module.py"}


def test_a_profiler_by_its_settings():
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(activities=["cpu"], record_shapes=True)])
    with accelerator.profile() as profile:
        torch.ones(2) + 1
    assert any("add" in event.key for event in profile.key_averages())
