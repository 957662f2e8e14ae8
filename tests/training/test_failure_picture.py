"""A run that runs out of memory draws what it had: the path of the picture is in the message."""

import pytest
import torch

import trimtab.training.loop
from tiny_runs import NO_DROPOUT, lines_of, reviews
from trimtab import Recipe, fit
from trimtab.errors import DoesNotFit
from trimtab.planner import out_of_memory
from trimtab.report.step_record import Allocation, StepRecord

pytestmark = pytest.mark.usefixtures("own_folder")
window_gradients = trimtab.training.loop.window_gradients


@pytest.fixture
def run_out(monkeypatch):
    """Memory runs out in the first `times` computed windows."""

    def run_out(times):
        calls = []

        def compute(*parts, **options):
            calls.append(1)
            if len(calls) <= times:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 …")
            return window_gradients(*parts, **options)

        monkeypatch.setattr("trimtab.training.loop.window_gradients", compute)

    return run_out


@pytest.fixture
def train(tiny, tmp_path):
    def train(progress="quiet", **sections):
        usual = {
            "model": tiny.folder("bert", **NO_DROPOUT["bert"]),
            "data": {"train": reviews(16), "eval": None, "eval_share": 0},
            "train": {"epochs": 1, "lr": 1e-3, "batch_size": 8, "log_every": 1},
            "checkpoint": {"every": None, "best": False},
            "out": str(tmp_path / "run"),
        }
        return fit(Recipe(**usual | sections), progress=progress, device="cpu")

    return train


def test_the_picture_is_beside_the_message(train, run_out, tmp_path, capsys):
    run_out(1)
    train(progress="plain")
    path = tmp_path / "run" / "out-of-memory.html"
    what = "out of memory (64.00 MiB more were needed) at step 1: micro-batch size 8 → 4"
    assert f"{what}\n  picture: {path}\n" in "".join(capsys.readouterr())
    assert [line["note"] for line in lines_of(tmp_path / "run") if "note" in line] == [what]
    page = path.read_text()
    assert "<h1>Out of memory (64.00 MiB more were needed) at step 1: " in page
    assert "Predicted on cpu" in page
    assert "micro-batch 8" in page, "the one that failed"
    assert "bert.encoder.layer.*" in page or "bert.encoder.layer.0" in page


@pytest.mark.slow
def test_a_run_that_ends_names_the_picture(train, run_out, tmp_path):
    run_out(99)
    with pytest.raises(DoesNotFit, match="with a micro-batch size of 1") as failure:
        train()
    path = tmp_path / "run" / "out-of-memory.html"
    assert str(failure.value).endswith(f"picture: {path}")
    assert "micro-batch 1" in path.read_text()


@pytest.mark.slow
def test_what_the_allocator_held_is_drawn_too(train, run_out, tmp_path, monkeypatch):
    moment = StepRecord(
        "measured", "cuda:0", (Allocation(2**30, "weights", "a.weight"), Allocation(2**31, "activations"))
    )
    monkeypatch.setattr(out_of_memory, "memory_now", lambda model, optimizer, device: moment)
    run_out(1)
    train()
    page = (tmp_path / "run" / "out-of-memory.html").read_text()
    assert page.index("Measured on cuda:0") < page.index("Predicted on cpu")
    assert "3.0 GiB allocated" in page


@pytest.mark.slow
def test_a_step_that_cannot_be_predicted_is_retried_all_the_same(train, run_out, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no trace")

    monkeypatch.setattr(out_of_memory.RecipePlanner, "prediction", fail)
    run_out(1)
    train()
    (note,) = [line["note"] for line in lines_of(tmp_path / "run") if "note" in line]
    assert note.endswith("micro-batch size 8 → 4")
    assert not (tmp_path / "run" / "out-of-memory.html").exists()


@pytest.mark.slow
def test_an_optimizer_that_runs_out_is_drawn(train, tmp_path, monkeypatch):
    def step(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 …")

    monkeypatch.setattr("trimtab.training.loop.take_step", step)
    with pytest.raises(DoesNotFit, match="in the optimizer at step 1") as failure:
        train()
    path = tmp_path / "run" / "out-of-memory.html"
    assert str(failure.value).endswith(f"memory.micro_batch\n  picture: {path}")
    assert "Out of memory (2.00 GiB more were needed) in the optimizer at step 1" in path.read_text()


@pytest.mark.slow
def test_a_page_that_cannot_be_made_is_a_warning(train, run_out, tmp_path, monkeypatch):
    """Whatever the reason: here a name that UTF-8 has no bytes for."""
    monkeypatch.setattr(out_of_memory, "render_memory_page", lambda page: f"{page.title} \ud800")
    run_out(1)
    train()
    (note,) = [line["note"] for line in lines_of(tmp_path / "run") if "note" in line]
    assert note.endswith("micro-batch size 8 → 4")
