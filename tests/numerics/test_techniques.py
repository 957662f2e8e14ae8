"""Memory techniques change no result beyond rounding: each one and random pairs, compared with plain steps.

Three steps of SGD without clipping: a wrong gradient shows at once, and both matrices of an adapter get gradients,
although the second starts as zero.
"""

import itertools
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rounding import assert_same_up_to_rounding
from tiny_runs import lines_of, reviews, write_csv
from trimtab import Recipe, fit
from trimtab.model import offloaded_blocks

SGD = {"optimizer": "sgd", "lr": 0.3, "max_grad_norm": None}
METHODS = {
    "full": {},
    "lora": {"adapter": {"kind": "lora", "rank": 4}},
    "qlora": {"adapter": {"kind": "qlora", "rank": 4}},
    "dora": {"adapter": {"kind": "lora", "rank": 4, "dora": True}},
    "ia3": {"adapter": "ia3"},
    "pissa": {"adapter": {"kind": "lora", "rank": 4, "init": "pissa"}},
    "side": {"adapter": {"kind": "side", "reduction": 4}},
    "upper half": {"train": {"freeze": {"*.layers.0": "always", "*.embed_tokens": "always"}}},
}
ROUNDED = {"fp8": {"adapter": {"kind": "lora", "base": "fp8", "rank": 4}}}  # other last bits can round to other codes
TECHNIQUES = {
    "all": ("gradient_checkpointing", "all"),
    "ops": ("gradient_checkpointing", "ops"),
    "every 2": ("gradient_checkpointing", {"every": 2}),
    "last": ("gradient_checkpointing", {"layers": [-1]}),
    "offload": ("offload_activations", "all"),
    "offload every 2": ("offload_activations", {"every": 2}),
    "tiles": ("tile_tokens", 50),
    "chunked": ("loss", "chunked"),
    "micro 2": ("micro_batch", 2),
    "micro 3": ("micro_batch", 3),
}


def compatible_pairs():
    """Return all pairs of techniques with different keys, in random order."""
    pairs = [pair for pair in itertools.combinations(TECHNIQUES, 2) if TECHNIQUES[pair[0]][0] != TECHNIQUES[pair[1]][0]]
    pairs = [pair for pair in pairs if not ("ops" in pair and {"offload", "offload every 2", "tiles"} & set(pair))]
    return random.Random(6).sample(pairs, len(pairs))


PAIRS = compatible_pairs()
# quick: every technique without an adapter, and another one with each method
QUICK = {*(("full", name) for name in TECHNIQUES), *zip(METHODS, TECHNIQUES, strict=False), ("lora", "micro 2")}
CASES = [
    pytest.param(method, (name,), marks=() if (method, name) in QUICK else pytest.mark.slow)
    for method in METHODS
    for name in TECHNIQUES
]
CASES += [
    pytest.param(method, pair, marks=pytest.mark.slow)
    for index, method in enumerate(METHODS)
    for pair in PAIRS[index :: len(METHODS)]
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny):
    """A function that trains three steps, once per setting."""
    root, made = tmp_path_factory.mktemp("techniques"), {}
    rows = write_csv(root / "rows.csv", reviews(36))

    def train(method, techniques=(), **sections):
        name = "-".join([method, *techniques, *map(str, sections.values())]).replace("/", "")
        if name not in made:
            settings = (METHODS | ROUNDED)[method]
            out = root / str(len(made))
            recipe = Recipe(
                model=tiny.folder("llama", num_hidden_layers=3, hidden_size=64, intermediate_size=96),
                task="causal-lm",
                data={"train": str(rows), "text": "text", "eval_share": 0},
                memory=dict(TECHNIQUES[technique] for technique in techniques),
                checkpoint={"every": None},
                out=str(out),
                **{key: value for key, value in settings.items() if key != "train"},
                **sections,
                train=SGD | {"max_steps": 3, "batch_size": 12, "log_every": 1} | settings.get("train", {}),
            )
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(offloaded_blocks, "MIN_BYTES", 256)
                fit(recipe, progress="quiet")
            made[name] = weights_of(out), [line["loss"] for line in lines_of(out) if "loss" in line]
        return made[name]

    return train


def weights_of(run: Path):
    return load_file(next((run / "best").glob("*.safetensors")))


@pytest.mark.parametrize(
    ("method", "techniques"), CASES, ids=lambda value: value if isinstance(value, str) else "+".join(value)
)
def test_results_equal_those_of_plain_steps(trained, method, techniques):
    plain, plain_losses = trained(method)
    found, losses = trained(method, techniques)
    assert_same_up_to_rounding(losses, plain_losses, num_roundings=8)
    assert found.keys() == plain.keys()
    for name, weight in plain.items():
        # gradients are sums over hundreds of tokens of values up to 1, whatever the size of the weight
        assert_same_up_to_rounding(found[name], weight, num_roundings=8, size=max(1.0, float(weight.abs().max())))


def test_the_steps_moved_the_weights(trained):
    """Without this the comparison above would be void."""
    plain, losses = trained("lora")
    assert len(losses) == 3
    assert losses[2] < losses[0] - 0.01
    assert all(bool(weight.any()) for weight in plain.values()), "both matrices of every adapter have learnt"


@pytest.mark.parametrize("method", ["qlora", "fp8"])
def test_quantized_weights_change_the_loss_slightly(trained, method):
    """Compared with LoRA on unquantized weights: the same steps, the loss within 2%."""
    _, exact = trained("lora")
    _, lossy = trained(method)
    assert lossy != exact
    assert lossy == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("recomputed", ["ops", *(pytest.param(r, marks=pytest.mark.slow) for r in ("all", "every 2"))])
def test_fp8_is_recomputed_to_the_bit(trained, recomputed):
    plain, losses = trained("fp8")
    found, again = trained("fp8", (recomputed,))
    assert again == losses
    assert all(torch.equal(found[name], weight) for name, weight in plain.items())


def test_frozen_layers_do_not_change(trained):
    whole, _ = trained("full")
    upper, _ = trained("upper half")
    changed = {name for name in whole if not torch.equal(whole[name], upper[name])}
    assert any("layers.0" in name for name in changed)
