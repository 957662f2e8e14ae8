"""A folder is a whole checkpoint or none; what does not fit is refused with its cause, and then nothing was changed."""

import json
import pickle
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.utils.data import DataLoader, TensorDataset

from trimtab import Engine
from trimtab.checkpoint.codec import encode
from trimtab.checkpoint.store import StoredCheckpoint, write_checkpoint
from trimtab.errors import CheckpointError
from trimtab.randomness import random_state


class Counter:
    """An object of the user's."""

    def __init__(self, refusal: Exception | None = None):
        self.count, self.refusal = 0, refusal

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]
        if self.refusal is not None:
            raise self.refusal


class Run:
    """Everything that can be prepared, in the middle of an epoch and of a window."""

    def __init__(
        self,
        seed,
        width=4,
        optimizer=torch.optim.AdamW,
        num_groups=1,
        num_models=1,
        objects=(),
        generator=True,
    ):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.models = [
            torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 1)) for _ in range(num_models)
        ]
        parameters = list(self.models[0].parameters())
        groups = [{"params": parameters[index::num_groups]} for index in range(num_groups)]
        plain = optimizer(groups, lr=0.1 / seed)
        own = torch.Generator().manual_seed(seed) if generator else None
        loader = DataLoader(TensorDataset(torch.randn(7, 3)), 1, shuffle=True, generator=own)
        self.engine = Engine(device="cpu", gradient_accumulation_steps=2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
        *_, self.optimizer, self.loader, self.scheduler = self.engine.prepare(*self.models, plain, loader, scheduler)
        self.objects = [Counter(), *objects]
        self.engine.register_for_checkpointing(*self.objects)
        self.batches = iter(self.loader)

    def train(self, num_batches):
        for _ in range(num_batches):
            (x,) = next(self.batches)
            with self.engine.accumulate(self.models[0]):
                self.engine.backward(self.models[0](x).square().mean())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.objects[0].count += 1
        return self

    def fingerprint(self):
        """All state in text and bytes, with the addresses of what must not move."""
        parameters = [p for model in self.models for p in model.parameters()]
        state = encode(
            {
                "weights": [model.state_dict() for model in self.models],
                "gradients": [p.grad for p in parameters],
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "loader": self.loader.state_dict(),
                "objects": [counter.state_dict() for counter in self.objects],
                "window": self.engine._accumulation.state_dict(),
                "random": random_state(),
            }
        )
        tensors = {name: tensor.reshape(-1).view(torch.uint8).tolist() for name, tensor in state.tensors.items()}
        return json.dumps(state.tree), tensors, [p.data_ptr() for p in parameters]


def contents(folder: Path):
    return {str(path.relative_to(folder)): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@pytest.fixture
def ckpt(tmp_path):
    """A good checkpoint of `Run(1)` after three batches."""
    run = Run(1).train(3)  # a name, so that the iteration is not given up before the save
    run.engine.save_state(tmp_path / "ckpt")
    return tmp_path / "ckpt"


def assert_refused(folder, cause, run=None):
    """A message with the cause, and every object exactly as before, at its place as well."""
    run = (run or Run(2)).train(3)
    before = run.fingerprint()
    with pytest.raises(CheckpointError, match=cause):
        run.engine.load_state(folder)
    assert run.fingerprint() == before
    run.train(1)  # the epoch and the window that are open go on


# ---------------------------------------------------------------------- folders


def test_a_checkpoint_is_json_and_safetensors(ckpt):
    names = {path.name for path in ckpt.iterdir()}
    assert {"trimtab.json", "state.json", "model.safetensors", "optimizer.safetensors"} <= names
    assert {path.suffix for path in ckpt.iterdir()} == {".json", ".safetensors"}
    weights = safetensors.torch.load_file(ckpt / "model.safetensors")
    assert weights.keys() == Run(1).models[0].state_dict().keys()
    assert [path.name for path in ckpt.parent.iterdir()] == ["ckpt"]


def test_loading_restores_all(ckpt):
    run = Run(1).train(3)
    expected = run.fingerprint()[:2]
    run.train(4)
    run.engine.load_state(ckpt)
    assert run.fingerprint()[:2] == expected


def test_nothing_is_unpickled(ckpt, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pickle was used")

    for name in ("dumps", "loads", "dump", "load", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    Run(2).engine.load_state(ckpt)


def test_parents_are_made_and_an_empty_folder_is_taken(tmp_path):
    run = Run(1)
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "a" / "b" / "c", tmp_path / "empty", str(tmp_path / "text")):
        assert run.engine.save_state(folder) == str(folder)
        run.engine.load_state(folder)


def test_a_relative_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Run(1).engine.save_state("ckpt") == "ckpt"
    Run(2).engine.load_state("ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_saving_again_replaces_the_folder_whole(ckpt):
    (ckpt / "note.txt").write_text("of the old one")
    old = contents(ckpt)
    Run(3, num_models=2).engine.save_state(ckpt)
    new = contents(ckpt)
    assert "note.txt" not in new
    assert "model_1.safetensors" in new
    assert new["state.json"] != old["state.json"]
    assert [path.name for path in ckpt.parent.iterdir()] == ["ckpt"]
    Run(4, num_models=2).engine.load_state(ckpt)


def test_a_link_to_a_folder_stays_a_link(ckpt):
    link = ckpt.with_name("latest")
    link.symlink_to("ckpt")
    before = contents(ckpt)
    Run(3).engine.save_state(link)
    assert link.is_symlink()
    assert contents(ckpt) != before
    assert {path.name for path in ckpt.parent.iterdir()} == {"ckpt", "latest"}


def test_files_that_are_no_checkpoint_are_never_replaced(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("mine too")
    before = contents(tmp_path)
    for name in ("file", "folder"):
        with pytest.raises(CheckpointError, match=f"{name} (is a file|holds other files)"):
            Run(1).engine.save_state(tmp_path / name)
    assert contents(tmp_path) == before


class Unsaveable(Counter):
    def state_dict(self):
        return {"function": print}


@pytest.mark.parametrize("failure", ["unsaveable object", "full disk", "full disk at the end", "rename"])
def test_a_save_that_fails_leaves_the_old_checkpoint(ckpt, failure, monkeypatch):
    before = contents(ckpt.parent)
    run = Run(3, objects=[Unsaveable()] if failure == "unsaveable object" else [])
    if failure == "full disk":
        save_file, saved = safetensors.torch.save_file, []

        def fail_at_the_second(tensors, path):
            if saved:
                raise OSError(28, "No space left on device")
            saved.append(save_file(tensors, path))

        monkeypatch.setattr(safetensors.torch, "save_file", fail_at_the_second)
    elif failure == "full disk at the end":
        write_text = Path.write_text

        def fail_at_the_manifest(path, text):
            if path.name == "trimtab.json":
                raise OSError(28, "No space left on device")
            return write_text(path, text)

        monkeypatch.setattr(Path, "write_text", fail_at_the_manifest)
    elif failure == "rename":
        rename = Path.rename

        def fail_into_place(path, target):
            if ".writing-" in path.name:
                raise OSError(5, "Input/output error")
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", fail_into_place)
    with pytest.raises((OSError, CheckpointError)):
        run.engine.save_state(ckpt)
    monkeypatch.undo()
    assert contents(ckpt.parent) == before
    Run(4).engine.load_state(ckpt)


# ---------------------------------------------------------------------- damaged folders


def remove(name):
    return lambda folder: (folder / name).unlink()


def overwrite(name, text):
    return lambda folder: (folder / name).write_text(text)


def garble(name):
    """Another text of the same length, so that sizes do not tell."""
    return lambda folder: (folder / name).write_bytes(b"\xff" * (folder / name).stat().st_size)


def cut(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-8])


def edit(change, name="state.json"):
    """Change what a JSON file says, in a folder that is whole by its manifest."""

    def damage(folder):
        value = json.loads((folder / name).read_text())
        changed = change(value)
        (folder / name).write_text(json.dumps(value if changed is None else changed))
        manifest = json.loads((folder / "trimtab.json").read_text())
        if name != "trimtab.json":
            manifest["files"][name] = (folder / name).stat().st_size
            (folder / "trimtab.json").write_text(json.dumps(manifest))

    return damage


def swap(folder):
    """A file of the right size from elsewhere: its header names other tensors."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    other = {name.replace("weight", "thgiew"): tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(other, folder / "model.safetensors")


def transpose(folder):
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["0.weight"] = tensors["0.weight"].t().contiguous()
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


DAMAGE = {
    "cut weights": (cut("model.safetensors"), r"model\.safetensors was cut off or changed: \d+ bytes instead of \d+"),
    "cut optimizer": (cut("optimizer.safetensors"), r"optimizer\.safetensors was cut off"),
    "cut state": (cut("state.json"), r"state\.json was cut off"),
    "no weights": (remove("model.safetensors"), r"not whole: model\.safetensors is missing"),
    "no optimizer": (remove("optimizer.safetensors"), r"not whole: optimizer\.safetensors is missing"),
    "no state": (remove("state.json"), r"not whole: state\.json is missing"),
    "no manifest": (remove("trimtab.json"), r"is no checkpoint of trimtab: it holds"),
    "garbage state": (garble("state.json"), r"state\.json cannot be read"),
    "garbage weights": (garble("model.safetensors"), r"model\.safetensors cannot be read"),
    "garbage optimizer": (garble("optimizer.safetensors"), r"optimizer\.safetensors cannot be read"),
    "garbage random state": (garble("random.safetensors"), r"random\.safetensors cannot be read"),
    "garbage manifest": (overwrite("trimtab.json", "{not json"), r"trimtab\.json cannot be read"),
    "manifest of nothing": (overwrite("trimtab.json", "[]"), r"trimtab\.json cannot be read: a JSON object was"),
    "manifest without files": (overwrite("trimtab.json", '{"format": 1}'), r"trimtab\.json lists no files"),
    "deep manifest": (overwrite("trimtab.json", "[" * 100_000), r"trimtab\.json cannot be read"),
    "other format": (
        edit(lambda m: m | {"format": 99}, "trimtab.json"),
        "has checkpoint format 99; this version reads",
    ),
    "file elsewhere": (edit(lambda m: m["files"].update({"../x": 1}), "trimtab.json"), r"\.\./x is missing"),
    "state is a list": (edit(lambda s: [s]), r"state\.json cannot be read: a JSON object was expected"),
    "part is a number": (edit(lambda s: s | {"model": 3}), "the saved model is damaged"),
    "part is empty": (edit(lambda s: s | {"optimizer": {}}), "the saved optimizer is damaged: KeyError 'kind'"),
    "weight is a number": (edit(lambda s: s["model"].update({"0.bias": 3})), r"0\.bias is no tensor"),
    "moments are a number": (
        edit(lambda s: s["optimizer"]["state"].update({"0.bias": 3})),
        "the saved optimizer is damaged",
    ),
    "gradient is a number": (
        edit(lambda s: s["optimizer"]["gradients"].update({"0.bias": 3})),
        r"of 0\.bias is no tensor",
    ),
    "no random state": (edit(lambda s: s | {"random": {}}), "holds no random state"),
    "no scheduler": (
        edit(lambda s: s.pop("scheduler") and None),
        "not hold what was prepared here: it is without scheduler",
    ),
    "scheduler of junk": (edit(lambda s: s | {"scheduler": {"$": "pickle", "value": ""}}), "of kind 'pickle'"),
    "loader without place": (
        edit(lambda s: s | {"loader": {}}),
        r"loader \(PreparedLoader\) cannot load its state: KeyError",
    ),
    "object of junk": (
        edit(lambda s: s | {"object": {}}),
        r"object \(Counter\) cannot load its state: KeyError 'count'",
    ),
    "other names": (swap, r"model\.safetensors cannot be read: .*weight"),
    "other shape in the file": (transpose, r"holds 0\.weight as \[3, 4\] instead of \[4, 3\]"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_changes_nothing(ckpt, name):
    damage, cause = DAMAGE[name]
    damage(ckpt)
    assert_refused(ckpt, cause)


def test_folders_that_are_none_of_ours(tmp_path):
    assert_refused(tmp_path / "missing", "missing is no folder")
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / "empty", "is no checkpoint of trimtab: it is empty")
    (tmp_path / "foreign").mkdir()
    for name in ("optimizer.bin", "random_states_0.pkl"):
        (tmp_path / "foreign" / name).write_bytes(pickle.dumps({"a": 1}))
    assert_refused(tmp_path / "foreign", r"it holds optimizer\.bin, random_states_0\.pkl\n.*never unpickles")
    (tmp_path / "file").write_text("text")
    assert_refused(tmp_path / "file", "file is no folder")


# ---------------------------------------------------------------------- checkpoints of another run

OTHERS = {
    "shapes": ({"width": 5}, r"0\.(weight|bias)'?s? is .*\[4.*\] in the checkpoint and .*\[5"),
    "optimizer": ({"optimizer": torch.optim.NAdam}, "of the optimizer AdamW, not NAdam"),
    "number of groups": ({"num_groups": 2}, "has 1 parameter groups, this one 2"),
    "number of models": ({"num_models": 2}, "without model_1"),
    "number of objects": ({"objects": [Counter()]}, "without object_1"),
    "generators": ({"generator": False}, "the loader has 0 generators of its own, the saved one 1"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_run_changes_nothing(ckpt, name):
    options, cause = OTHERS[name]
    assert_refused(ckpt, cause, Run(2, **options))


def test_fewer_objects_than_saved(tmp_path):
    Run(1, num_models=2, objects=[Counter()]).engine.save_state(tmp_path / "ckpt")
    assert_refused(tmp_path / "ckpt", "it is with model_1, object_1")


def test_other_parameters_in_a_group(tmp_path):
    Run(1, num_groups=2).engine.save_state(tmp_path / "ckpt")
    run = Run(2, num_groups=2)
    first, second = run.optimizer.param_groups
    first["params"][0], second["params"][0] = second["params"][0], first["params"][0]
    assert_refused(tmp_path / "ckpt", r"parameter group 0 differs: it is without 0\.bias; it is with 0\.weight", run)


def test_another_dtype(tmp_path, ckpt):
    run = Run(2)
    run.models[0][1].bias.data = run.models[0][1].bias.data.bfloat16()
    with pytest.raises(CheckpointError, match=r"1\.bias is float32 \[1\] in the checkpoint and bfloat16 \[1\]"):
        run.engine.load_state(ckpt)


def test_shapes_of_an_optimizer_whose_model_was_not_prepared(tmp_path):
    def engine_of(width):
        engine = Engine(device="cpu")
        engine.prepare(torch.optim.SGD([torch.nn.Parameter(torch.ones(width))], lr=0.1))
        return engine

    engine_of(3).save_state(tmp_path / "ckpt")
    engine_of(3).load_state(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match=r"group0\.0 is \[3\] in the checkpoint and \[4\] here"):
        engine_of(4).load_state(tmp_path / "ckpt")


class OfTheUser(Exception):
    pass


@pytest.mark.parametrize(
    "refusal", [KeyError("k"), ValueError("v"), OSError("o"), AssertionError("a"), OfTheUser("u"), StopIteration("s")]
)
def test_an_object_that_refuses_its_state_changes_nothing(tmp_path, refusal):
    """It is loaded among others, and has even begun to change itself."""
    saved = Run(1, objects=[Counter(), Counter()]).train(3)
    saved.engine.save_state(tmp_path / "ckpt")
    refusing = Counter(refusal)
    run = Run(2, objects=[refusing, Counter()])
    run.objects[2].count = 17
    assert_refused(tmp_path / "ckpt", rf"object_1 \(Counter\) cannot load its state: {type(refusal).__name__}", run)


# ---------------------------------------------------------------------- the parts below the engine


def test_a_stored_checkpoint_gives_back_its_parts(tmp_path):
    parts = {"a": encode({"x": torch.ones(2), "n": 1}), "b": encode([1, 2])}
    assert write_checkpoint(tmp_path / "c", parts) == tmp_path / "c"
    stored = StoredCheckpoint(tmp_path / "c")
    assert list(stored.trees) == ["a", "b"]
    assert torch.equal(stored.tensor_reader("a")("x"), torch.ones(2))
    assert not (tmp_path / "c" / "b.safetensors").exists()
    with pytest.raises(CheckpointError, match=r"b\.safetensors cannot be read"):
        stored.tensor_reader("b")("x")
    with pytest.raises(CheckpointError, match=r"a\.safetensors cannot be read"):
        stored.tensor_reader("a")("y")


def test_what_a_killed_save_left_behind_is_in_nobodys_way(ckpt):
    """A folder of another process beside the checkpoint is neither read nor taken for one."""
    beside = ckpt.with_name(".ckpt.writing-1")
    shutil.copytree(ckpt, beside)
    (beside / "state.json").unlink()
    Run(2).engine.load_state(ckpt)
    Run(3).engine.save_state(ckpt)
    assert {path.name for path in ckpt.parent.iterdir()} == {"ckpt", ".ckpt.writing-1"}
