"""Mixtures of experts in two processes: router losses as stated, and experts that get tokens in one process or none."""

import expert_loops
import pytest
import torch
from expert_loops import SETTINGS
from launching import run_both_ways

from rounding import assert_same_up_to_rounding
from tiny_runs import lines_of, reviews, write_csv
from trimtab.distributed.ddp import has_routed_modules
from trimtab.model.hub import quiet_transformers


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    write_csv(folder / "rows.csv", reviews(9))  # the last batch has one row
    (folder / "switch").write_text(tiny.folder("t5", **expert_loops.CONFIGS["switch"]))
    return folder


@pytest.fixture(scope="module")
def results(fork_server, folder):
    """What each process found, by (number of processes, rank)."""
    return run_both_ways(fork_server, expert_loops, folder)


def test_models_with_a_module_for_each_expert_are_recognized():
    assert has_routed_modules(expert_loops.a_model("switch"))
    assert not has_routed_modules(expert_loops.a_model("switch", frozen=True))
    assert not has_routed_modules(expert_loops.a_model("mixtral"))


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_two_processes_train_as_one(results, setting):
    alone, together, other = (results[key][setting] for key in [(1, 0), (2, 0), (2, 1)])
    dtype = torch.float16 if setting == "fp16" else torch.float32
    for key in ("losses", "norms"):
        for one, two in zip(alone[key], together[key], strict=True):
            assert two == pytest.approx(one, rel=32 * torch.finfo(dtype).eps)
    assert alone["weights"].keys() == together["weights"].keys()
    size = max(float(gradient.abs().max()) for gradient in alone["gradients"].values())
    for name, weight in alone["weights"].items():
        assert torch.equal(together["weights"][name], other["weights"][name]), name
        # two steps with momentum: the differences are those of gradients
        bound = max(size, float(weight.abs().max())) if dtype is torch.float32 else size
        difference = (together["weights"][name] - weight).abs().max()
        assert difference <= 64 * torch.finfo(dtype).eps * bound, name


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["mixtral eager", "qwen3_moe eager", "gpt_oss eager", "switch eager"])
def test_experts_are_without_tokens(setting):
    """Some in one process only, some in both: otherwise these tests would show nothing."""
    name = SETTINGS[setting]["name"]
    model = expert_loops.a_model(name, "eager")
    with quiet_transformers():
        used = expert_loops.experts_with_tokens(model, expert_loops.micro_batches(name, 0))
    first, second = used[0] | used[2], used[1] | used[3]
    every = {
        (part, index)
        for part, parameter in model.named_parameters()
        if ".experts." in part
        for index in range(parameter.shape[0] if parameter.ndim == 3 else 1)
    }
    assert first - second
    assert second - first
    assert every - first - second


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["mixtral grouped_mm", "switch eager"])
def test_the_loss_is_that_of_the_micro_batches_weighted_by_tokens(results, setting):
    """Router losses are means over a micro-batch; the window's is their mean, weighted by tokens with loss."""
    settings = SETTINGS[setting]
    model, batches = expert_loops.a_model(**settings), expert_loops.micro_batches(settings["name"], 0)
    shift = 0 if settings["name"] == "switch" else 1
    counts = [batch["labels"].shape[1] - shift for batch in batches]
    with quiet_transformers():
        losses = [model(**batch).loss for batch in batches]
    expected = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    model.zero_grad(set_to_none=True)
    expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), expert_loops.MAX_NORM)
    size = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for key in results:
        found = results[key][setting]
        assert found["losses"][0] == pytest.approx(float(expected.detach()), rel=16 * torch.finfo().eps)
        assert found["norms"][0] == pytest.approx(float(norm), rel=32 * torch.finfo().eps)
        for name, parameter in model.named_parameters():
            gradient = found["gradients"].get(name)
            assert (gradient is None) == (parameter.grad is None), name
            if gradient is not None:
                assert_same_up_to_rounding(gradient, parameter.grad, num_roundings=32, size=size)


@pytest.mark.slow
@pytest.mark.usefixtures("results")
def test_a_recipe_on_two_processes(folder):
    alone, together = (lines_of(folder / f"run-{count}") for count in (1, 2))
    for key in ("loss", "grad_norm"):
        one, two = ([line[key] for line in lines if key in line] for lines in (alone, together))
        assert len(one) == 3
        assert two == pytest.approx(one, rel=256 * torch.finfo().eps)


@pytest.mark.slow
def test_frozen_experts_stay(results):
    for setting in ("frozen", "frozen switch"):
        start = dict(expert_loops.a_model(**SETTINGS[setting]).named_parameters())
        for found in results.values():
            for name, weight in found[setting]["weights"].items():
                assert torch.equal(weight, start[name]) == (".experts." in name), name
