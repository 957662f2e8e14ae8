"""A folder is a whole checkpoint or none; what does not fit is refused with its cause, and then nothing was changed."""

import json
import pickle
import random
import zlib
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.utils.data import DataLoader, TensorDataset

from trimtab import Engine
from trimtab.checkpoint.codec import encode
from trimtab.checkpoint.store import StoredCheckpoint, find_checkpoint_problem, read_manifest, verify, write_checkpoint
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
    run.train(1)  # the open epoch and window continue


# ---------------------------------------------------------------------- folders


def test_a_checkpoint_is_json_and_safetensors(ckpt):
    names = {path.name for path in ckpt.iterdir()}
    assert {"trimtab.json", "state.json", "model.safetensors", "optimizer.safetensors"} <= names
    assert {path.suffix for path in ckpt.iterdir()} == {".json", ".safetensors"}
    weights = safetensors.torch.load_file(ckpt / "model.safetensors")
    assert weights.keys() == Run(1).models[0].state_dict().keys()
    assert [path.name for path in ckpt.parent.iterdir()] == ["ckpt"]


def test_loading_restores_all_and_unpickles_nothing(ckpt, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pickle was used")

    for name in ("dumps", "loads", "dump", "load", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    run = Run(1).train(3)
    expected = run.fingerprint()[:2]
    run.train(4)
    run.engine.load_state(ckpt)
    assert run.fingerprint()[:2] == expected


def test_which_folders_are_written(tmp_path, monkeypatch):
    run = Run(1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "a" / "b" / "c", tmp_path / "empty", str(tmp_path / "text"), "relative"):
        assert run.engine.save_state(folder) == str(folder)
        run.engine.load_state(folder)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.tex").write_text("not a checkpoint")
    with pytest.raises(CheckpointError, match="own contains other files"):
        run.engine.save_state(tmp_path / "own")
    assert contents(tmp_path / "own") == {"thesis.tex": b"not a checkpoint"}


@pytest.mark.parametrize("through_link", [False, True])
def test_saving_again_replaces_the_folder_and_keeps_a_link_to_it(ckpt, through_link):
    target = ckpt.with_name("latest") if through_link else ckpt
    if through_link:
        target.symlink_to("ckpt")
    (ckpt / "note.txt").write_text("of the old one")
    old = contents(ckpt)
    Run(3, num_models=2).engine.save_state(target)
    new = contents(ckpt)
    assert "note.txt" not in new
    assert "model_1.safetensors" in new
    assert new["state.json"] != old["state.json"]
    assert target.is_symlink() == through_link
    assert {path.name for path in ckpt.parent.iterdir()} == {"ckpt", target.name}
    Run(4, num_models=2).engine.load_state(ckpt)


class Unsaveable(Counter):
    def state_dict(self):
        return {"function": print}


def test_a_state_that_cannot_be_saved_leaves_the_old_checkpoint(ckpt):
    before = contents(ckpt.parent)
    with pytest.raises(CheckpointError, match=r"object_1: the value at 'function' is a builtins\.builtin_function"):
        Run(3, objects=[Unsaveable()]).engine.save_state(ckpt)
    assert contents(ckpt.parent) == before


def test_a_file_that_cannot_grow_leaves_the_old_checkpoint(ckpt, file_size_limit):
    run, before = Run(3).train(3), contents(ckpt.parent)
    cause = r"ckpt could not be written: File too large\n.*free space"
    for share in (0.0, 0.5, 0.99):
        limit = int(share * max(path.stat().st_size for path in ckpt.iterdir()))
        with file_size_limit(limit), pytest.raises(CheckpointError, match=cause):
            run.engine.save_state(ckpt)
        assert contents(ckpt.parent) == before
    Run(4).engine.load_state(ckpt)
    run.engine.save_state(ckpt)
    assert contents(ckpt.parent) != before


def failure_of_saving(run, folder):
    try:
        run.engine.save_state(folder)
    except CheckpointError as error:
        return error.problem
    return None


def test_a_disk_that_is_full_at_any_point_leaves_the_old_checkpoint(small_disk, leave_free):
    """With every amount of room from none to enough, so that each file in turn is the one that does not fit."""
    ckpt, run = small_disk / "ckpt", Run(3)
    Run(1).engine.save_state(ckpt)
    before, failures = contents(ckpt), 0
    for num_pages in range(40):
        leave_free(num_pages)
        if failure_of_saving(run, ckpt) is None:
            break
        assert "ckpt could not be written: No space left on device" in failure_of_saving(run, ckpt)
        failures += 1
        assert contents(ckpt) == before
        assert {path.name for path in small_disk.iterdir()} == {"ckpt", "filler"}
        assert not find_checkpoint_problem(ckpt)
    assert failures > 8
    assert contents(ckpt) != before
    Run(4).engine.load_state(ckpt)


def test_a_folder_that_may_not_be_written(as_somebody):
    place, unprivileged = as_somebody
    run = Run(1)
    (place / "locked").mkdir()
    (place / "locked").chmod(0o555)
    with (
        unprivileged(),
        pytest.raises(CheckpointError, match=r"ckpt could not be written: Permission denied\n.*writable"),
    ):
        run.engine.save_state(place / "locked" / "ckpt")
    assert not list((place / "locked").iterdir())


def test_killed_between_two_renames_the_old_one_is_loaded(ckpt):
    ckpt.rename(ckpt.with_name(".ckpt.outdated-4194999"))
    Run(2).engine.load_state(ckpt)
    assert [path.name for path in ckpt.parent.iterdir()] == ["ckpt"]


# ---------------------------------------------------------------------- damaged folders


def remove(name):
    return lambda folder: (folder / name).unlink()


def overwrite(name, text):
    return lambda folder: (folder / name).write_text(text)


def garble(name, signed=False):
    """Another text of the same length, so that sizes do not tell; signed, so that checksums do not either."""

    def damage(folder):
        (folder / name).write_bytes(b"\xff" * (folder / name).stat().st_size)
        if signed:
            sign(folder)

    return damage


def cut(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-8])


def sign(folder):
    """Bring the manifest up to date with the files, as a forger would: what is wrong inside has to show by itself."""
    manifest = json.loads((folder / "trimtab.json").read_text())
    for name in manifest["files"]:
        if (folder / name).is_file():
            manifest["files"][name] = {
                "bytes": (folder / name).stat().st_size,
                "checksum": f"crc32:{zlib.crc32((folder / name).read_bytes()):08x}",
            }
    write_manifest(folder, manifest)


def write_manifest(folder, manifest):
    text = json.dumps({**manifest, "checksum": "crc32:00000000"}, indent=1)
    signature = f"crc32:{zlib.crc32(text.encode()):08x}"
    (folder / "trimtab.json").write_text(signature.join(text.rsplit("crc32:00000000", 1)))


def edit(change):
    """Change what the state says, in a folder that is whole by its manifest."""

    def damage(folder):
        value = json.loads((folder / "state.json").read_text())
        changed = change(value)
        (folder / "state.json").write_text(json.dumps(value if changed is None else changed))
        sign(folder)

    return damage


def edit_manifest(change):
    def damage(folder):
        manifest = json.loads((folder / "trimtab.json").read_text())
        write_manifest(folder, change(manifest) or manifest)

    return damage


def listed(name, content=b"x"):
    """A file more, which the manifest knows."""

    def damage(folder):
        path = folder / name
        path.write_bytes(content)
        manifest = json.loads((folder / "trimtab.json").read_text())
        manifest["files"][name] = {"bytes": len(content), "checksum": f"crc32:{zlib.crc32(content):08x}"}
        write_manifest(folder, manifest)

    return damage


def linked(folder):
    """The file is where it always was, but the folder only links to it."""
    (folder / "model.safetensors").rename(folder.parent / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere")


def swap(folder):
    """A file of the right size from elsewhere: its header names other tensors."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    other = {name.replace("weight", "thgiew"): tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(other, folder / "model.safetensors")
    sign(folder)


def transpose(folder):
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["0.weight"] = tensors["0.weight"].t().contiguous()
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    sign(folder)


DAMAGE = {
    "cut weights": (cut("model.safetensors"), r"model\.safetensors is damaged: it has \d+ bytes instead of \d+"),
    "no weights": (remove("model.safetensors"), r"incomplete: model\.safetensors is missing"),
    "no state": (remove("state.json"), r"incomplete: state\.json is missing"),
    "no manifest": (remove("trimtab.json"), r"is not a trimtab checkpoint: it contains"),
    "garbage state": (garble("state.json"), r"state\.json is damaged: its checksum is not crc32:"),
    "signed garbage state": (garble("state.json", signed=True), r"state\.json cannot be read"),
    "signed garbage weights": (garble("model.safetensors", signed=True), r"model\.safetensors cannot be read"),
    "signed garbage optimizer": (garble("optimizer.safetensors", True), r"optimizer\.safetensors cannot be read"),
    "signed garbage random state": (garble("random.safetensors", True), r"random\.safetensors cannot be read"),
    "garbage manifest": (overwrite("trimtab.json", "{not json"), r"trimtab\.json cannot be read"),
    "manifest of nothing": (overwrite("trimtab.json", "[]"), r"trimtab\.json cannot be read: expected a JSON object"),
    "manifest without files": (overwrite("trimtab.json", '{"format": 2}'), r"trimtab\.json lists no files"),
    "deep manifest": (overwrite("trimtab.json", "[" * 100_000), r"trimtab\.json cannot be read"),
    "other format": (edit_manifest(lambda m: m | {"format": 99}), "has checkpoint format 99; this version reads 2"),
    "older format": (
        overwrite("trimtab.json", '{"format": 1, "trimtab": "0.1.0", "torch": "2.13.0", "files": {"state.json": 2}}'),
        r"format 1, which has no checksums; this version reads 2\n.*the trimtab that wrote it \(0\.1\.0\)",
    ),
    "unsigned manifest": (
        lambda folder: overwrite("trimtab.json", (folder / "trimtab.json").read_text().replace("2.", "1."))(folder),
        r"trimtab\.json is damaged: its checksum",
    ),
    "manifest without checksum": (
        lambda folder: overwrite("trimtab.json", '{"format": 2, "files": {}, "facts": {}}')(folder),
        r"trimtab\.json is damaged",
    ),
    "files of numbers": (
        edit_manifest(lambda m: m["files"].update({"state.json": 3})),
        r"trimtab\.json cannot be read: TypeError",
    ),
    "facts of junk": (edit_manifest(lambda m: m | {"facts": {"$": "pickle", "value": ""}}), "cannot be read.*pickle"),
    "facts are a list": (edit_manifest(lambda m: m | {"facts": [1]}), "cannot be read"),
    "tensor among the facts": (
        edit_manifest(lambda m: m | {"facts": {"a": {"$": "tensor", "name": "x", "dtype": "int8", "shape": []}}}),
        "cannot be read",
    ),
    "state not listed": (
        edit_manifest(lambda m: m["files"].pop("state.json") and None),
        r"trimtab\.json does not list state\.json",
    ),
    **{
        f"path {path!r}": (
            edit_manifest(lambda m, path=path: m["files"].update({path: m["files"]["state.json"]})),
            "outside the folder",
        )
        for path in ("../x.json", "/etc/x.json", "a/b.json", "..", ".", "", "a\\b.json", "x\0.json", "./state.json")
    },
    "link": (linked, r"model\.safetensors is a symbolic link"),
    "folder for a file": (
        lambda folder: ((folder / "model.safetensors").unlink(), (folder / "model.safetensors").mkdir()),
        r"incomplete: model\.safetensors is missing",
    ),
    "listed pickle": (listed("extra.pkl", pickle.dumps({1: 2})), r"lists extra\.pkl, which is neither JSON nor"),
    "listed pickle of another name": (
        listed("model.safetensors", pickle.dumps({1: 2})),
        r"model\.safetensors cannot be read",
    ),
    "extra pickle": (
        lambda folder: (folder / "optimizer.pt").write_bytes(pickle.dumps({1: 2})),
        r"contains optimizer\.pt \(a pickle, by its extension\), which its manifest does not list\n.*do not trust",
    ),
    "extra folder": (lambda folder: (folder / "notes").mkdir(), "contains notes, which its manifest does not list"),
    "state is a list": (edit(lambda s: [s]), r"state\.json cannot be read: expected a JSON object"),
    "part is a number": (edit(lambda s: s | {"model": 3}), "the saved model is damaged"),
    "part is empty": (edit(lambda s: s | {"optimizer": {}}), "the saved optimizer is damaged: KeyError 'kind'"),
    "weight is a number": (edit(lambda s: s["model"].update({"0.bias": 3})), r"0\.bias is not a tensor"),
    "moments are a number": (
        edit(lambda s: s["optimizer"]["state"].update({"0.bias": 3})),
        "the saved optimizer is damaged",
    ),
    "gradient is a number": (
        edit(lambda s: s["optimizer"]["gradients"].update({"0.bias": 3})),
        r"of 0\.bias is not a tensor",
    ),
    "no random state": (edit(lambda s: s | {"random": {}}), "contains no random state"),
    "no scheduler": (
        edit(lambda s: s.pop("scheduler") and None),
        "does not match the prepared objects: missing scheduler",
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
    "other shape in the file": (transpose, r"contains 0\.weight as \[3, 4\] instead of \[4, 3\]"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_changes_nothing(ckpt, name):
    damage, cause = DAMAGE[name]
    damage(ckpt)
    assert_refused(ckpt, cause)


def test_folders_that_are_none_of_ours(tmp_path):
    assert_refused(tmp_path / "missing", "missing is not a folder")
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / "empty", "is not a trimtab checkpoint: it is empty")
    (tmp_path / "foreign").mkdir()
    for name in ("optimizer.bin", "random_states_0.pkl"):
        (tmp_path / "foreign" / name).write_bytes(pickle.dumps({"a": 1}))
    assert_refused(tmp_path / "foreign", r"it contains optimizer\.bin, random_states_0\.pkl\n.*never unpickles")
    (tmp_path / "file").write_text("text")
    assert_refused(tmp_path / "file", "file is not a folder")


# ---------------------------------------------------------------------- checkpoints of another run

OTHERS = {
    "shapes": ({"width": 5}, r"0\.(weight|bias)'?s? is .*\[4.*\] in the checkpoint and .*\[5"),
    "optimizer": ({"optimizer": torch.optim.NAdam}, "with the optimizer AdamW, not NAdam"),
    "number of groups": ({"num_groups": 2}, "has 1 parameter groups, this one 2"),
    "number of models": ({"num_models": 2}, "missing model_1"),
    "number of objects": ({"objects": [Counter()]}, "missing object_1"),
    "generators": ({"generator": False}, "the loader has 0 generators, the saved one 1"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_run_changes_nothing(ckpt, name):
    options, cause = OTHERS[name]
    assert_refused(ckpt, cause, Run(2, **options))


def test_fewer_objects_than_saved(tmp_path):
    Run(1, num_models=2, objects=[Counter()]).engine.save_state(tmp_path / "ckpt")
    assert_refused(tmp_path / "ckpt", "unexpected model_1, object_1")


def test_other_parameters_in_a_group(tmp_path):
    Run(1, num_groups=2).engine.save_state(tmp_path / "ckpt")
    run = Run(2, num_groups=2)
    first, second = run.optimizer.param_groups
    first["params"][0], second["params"][0] = second["params"][0], first["params"][0]
    assert_refused(
        tmp_path / "ckpt", r"parameter group 0 of the checkpoint differs: missing 0\.bias; unexpected 0\.weight", run
    )


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


# ---------------------------------------------------------------------- checksums and facts


def flip(path, bit):
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)


@pytest.fixture
def small(tmp_path):
    parts = {"a": encode({"x": torch.arange(6.0), "n": 1}), "b": encode({"y": torch.ones(2, dtype=torch.int8)})}
    return write_checkpoint(tmp_path / "small", parts, {"step": 3, "metrics": {"loss": 0.25}})


@pytest.mark.parametrize("every", [61, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["a.safetensors", "b.safetensors", "state.json", "trimtab.json"])
def test_every_bit_of_every_file_counts(small, name, every):
    """Single bits flipped in turn, and the file cut to any length."""
    assert {path.name for path in small.iterdir()} == {"a.safetensors", "b.safetensors", "state.json", "trimtab.json"}
    path = small / name
    raw = path.read_bytes()
    for bit in range(0, 8 * len(raw), every):
        flip(path, bit)
        assert find_checkpoint_problem(small), f"bit {bit} of {name} was flipped unnoticed"
        flip(path, bit)
    for length in range(0, len(raw), every):
        path.write_bytes(raw[:length])
        assert find_checkpoint_problem(small, checksums=False), f"{name} was cut to {length} bytes unnoticed"
    path.write_bytes(raw + b" ")
    assert find_checkpoint_problem(small, checksums=False)
    path.write_bytes(raw)
    assert find_checkpoint_problem(small) == ""


def test_a_state_is_never_loaded_without_its_checksums(small):
    flip(small / "a.safetensors", 8 * (small / "a.safetensors").stat().st_size - 1)
    assert find_checkpoint_problem(small, checksums=False) == ""
    with pytest.raises(CheckpointError, match=r"a\.safetensors is damaged"):
        StoredCheckpoint(small)


def test_hidden_files_of_the_system_do_no_harm(small):
    (small / ".DS_Store").write_bytes(b"x")
    assert find_checkpoint_problem(small) == ""


def test_a_file_that_cannot_be_read_is_named(as_somebody):
    place, unprivileged = as_somebody
    folder = write_checkpoint(place / "c", {"a": encode({"x": torch.ones(2)})})
    (folder / "a.safetensors").chmod(0o000)
    with unprivileged():
        assert find_checkpoint_problem(folder) == f"{folder} cannot be read: Permission denied"


def test_facts_come_back_as_they_were(tmp_path):
    facts = {
        "step": 7,
        "metrics": {"loss": float("nan"), "accuracy": 0.1 + 0.2},
        "versions": ("2.13", "5.22"),
        "by process": {0: 1},
        "crc32:00000000": "crc32:00000000",
    }
    folder = write_checkpoint(tmp_path / "c", {"a": encode({"x": torch.ones(2)})}, facts)
    for found in (read_manifest(folder).facts, verify(folder).facts, StoredCheckpoint(folder).facts):
        assert repr(found) == repr(facts)


@pytest.mark.parametrize(
    ("facts", "cause"), [({"f": print}, "'f' is a builtins"), ({"t": torch.ones(1)}, "contains a tensor")]
)
def test_facts_that_are_none(tmp_path, facts, cause):
    with pytest.raises(CheckpointError, match=cause):
        write_checkpoint(tmp_path / "c", {}, facts)
    assert not list(tmp_path.iterdir())


def test_a_part_cannot_be_written_elsewhere(tmp_path):
    for name in ("../x", "a/b", "/tmp/x"):
        with pytest.raises(CheckpointError, match="cannot be the name of a file"):
            write_checkpoint(tmp_path / "c", {name: encode(torch.ones(1))})
    assert not list(tmp_path.iterdir())
