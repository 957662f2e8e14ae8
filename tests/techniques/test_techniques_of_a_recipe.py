"""What a recipe says about memory arrives in the run: that it computes the same is tested elsewhere."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tiny_runs import reviews, write_csv
from trimtab import Engine, Recipe, fit
from trimtab.errors import RecipeError, TrimtabError
from trimtab.model import linear_cross_entropy
from trimtab.model.adapters import adapter_of
from trimtab.model.blocks import blocks_of
from trimtab.model.fp8 import Fp8Linear
from trimtab.model.load import load_model
from trimtab.model.nf4 import is_nf4
from trimtab.optim.build import build_optimizer
from trimtab.techniques.adapter import AdapterTechnique
from trimtab.techniques.apply import check_settings, plain_spec
from trimtab.techniques.base import Accelerator, Case, Site
from trimtab.techniques.kernels import FusedKernels
from trimtab.techniques.optimizer_state import default_optimizer
from trimtab.techniques.recomputation import _OWN_FORWARD

PURE = [("auto", "RoundedAdamW"), ("sgd", "RoundedSGD"), ("adam8bit", "Adam8bit")]


class Look:
    """Keeps what a run trains with."""

    def on_step(self, state):
        self.model, self.optimizer = state.model, state.optimizer.optimizer


@pytest.fixture
def run(own_folder, tiny):
    write_csv(own_folder / "rows.csv", reviews(24))

    def train(name="llama", **sections):
        look = Look()
        recipe = Recipe(
            model=tiny.folder(name, num_hidden_layers=4),
            task="causal-lm",
            data={"train": "rows.csv", "text": "text", "eval_share": 0.25},
            train={"max_steps": 1, "batch_size": 6} | sections.pop("train", {}),
            checkpoint={"every": None},
            **sections,
        )
        look.plan = fit(recipe, callbacks=[look], progress="quiet", device="cpu").plan
        return look

    return train


@pytest.mark.parametrize(
    ("which", "wrapped"),
    [
        ("none", []),
        ("all", [0, 1, 2, 3]),
        ("ops", [0, 1, 2, 3]),
        ({"every": 2}, [0, 2]),
        ({"all_but_every": 4}, [0, 1, 2]),
        ({"layers": [1, -1]}, [1, 3]),
    ],
)
def test_gradient_checkpointing(run, which, wrapped):
    look = run(memory={"gradient_checkpointing": which})
    found = [number for number, (_, block) in enumerate(blocks_of(look.model)) if _OWN_FORWARD in block.__dict__]
    assert found == wrapped
    assert look.plan.gradient_checkpointing.startswith(str(which)[:2].replace("{'", "{"))


@pytest.mark.parametrize(
    ("which", "budget"),
    [
        ("none", None),
        ("auto", "8GiB"),
        pytest.param("none", "8GiB", marks=pytest.mark.slow),
        pytest.param("auto", None, marks=pytest.mark.slow),
    ],
)
def test_a_config_that_turns_on_checkpointing_does_not_decide(own_folder, tiny, which, budget):
    write_csv(own_folder / "rows.csv", reviews(24))
    folder = Path(shutil.copytree(tiny.folder("llama", num_hidden_layers=4), own_folder / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"gradient_checkpointing": True}))
    look = Look()
    recipe = Recipe(
        model=str(folder),
        task="causal-lm",
        data={"train": "rows.csv", "text": "text"},
        train={"max_steps": 1, "batch_size": 6},
        memory={"gradient_checkpointing": which, "budget": budget},
        checkpoint={"every": None},
    )
    plan = fit(recipe, callbacks=[look], progress="quiet", device="cpu").plan
    assert not look.model.is_gradient_checkpointing
    assert plan.gradient_checkpointing == "none"


def test_kernels_of_a_plan_from_another_machine_are_refused(tiny):
    cpu = torch.device("cpu")
    model = load_model(tiny.folder("llama"), "causal-lm", {}, None)
    with pytest.raises(TrimtabError, match="memory.kernels: liger needs"):  # a GPU, or the package
        FusedKernels().change_model(model, "liger", Site(cpu, Accelerator.of(cpu)))


@pytest.mark.parametrize(("how", "num_calls"), [("plain", 0), ("auto", 0), ("chunked", 3)])
def test_loss(run, monkeypatch, how, num_calls):
    """In chunks the kernel runs in the check before the first step, in the step, and in the evaluation of 6 rows."""
    calls, apply = [], linear_cross_entropy.ChunkedCrossEntropy.apply
    counted = staticmethod(lambda *args: calls.append(1) or apply(*args))
    monkeypatch.setattr(linear_cross_entropy.ChunkedCrossEntropy, "apply", counted)
    look = run(memory={"loss": how})
    assert len(calls) == num_calls
    assert look.plan.loss == ("chunked" if num_calls else "plain")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("auto", "AdamW"), ("adagrad", "Adagrad"), ("adamw8bit", "AdamW8bit"), ("paged-adagrad8bit", "Adagrad8bit")],
)
def test_optimizer(run, name, kind):
    look = run(train={"optimizer": name, "eps": 1e-6})
    assert type(look.optimizer).__name__ == kind
    assert look.optimizer.param_groups[0]["eps"] == 1e-6
    assert getattr(look.optimizer, "is_paged", False) is False, "a CPU has no pages"
    assert look.plan.optimizer == {"auto": "adamw"}.get(name, name)


@pytest.mark.parametrize(
    ("optimizer", "kind"), [("auto", "RoundedAdamW"), ("sgd", "RoundedSGD"), ("adam8bit", "Adam8bit")]
)
def test_bf16_pure(run, optimizer, kind):
    look = run(train={"precision": "bf16-pure", "optimizer": optimizer}, seed=5)
    assert {parameter.dtype for parameter in look.model.parameters()} == {torch.bfloat16}
    assert type(look.optimizer).__name__ == kind
    assert getattr(look.optimizer, "rounds_stochastically", True)
    assert look.optimizer.param_groups[0]["rounding_seed"] == 5


def test_every_setting_of_an_adapter(run):
    settings = {
        "kind": "lora",
        "rank": 4,
        "alpha": 6,
        "dropout": 0.25,
        "targets": ["q_proj", "v_proj"],
        "layers": [1, 2],
    }
    settings |= {"ranks": {"*.v_proj": 2}, "alphas": {"*.1.*.v_proj": 3}, "trains": ["lm_head"], "rslora": True}
    look = run(adapter=settings)
    adapter = adapter_of(look.model)
    places = [f"model.layers.{block}.self_attn.{name}" for block in (1, 2) for name in ("q_proj", "v_proj")]
    assert sorted(adapter.targets) == places
    assert adapter.trains == ("lm_head",)
    modules = {name: look.model.get_submodule(name) for name in places}
    assert [module.r["default"] for module in modules.values()] == [4, 2, 4, 2]
    assert [module.lora_alpha["default"] for module in modules.values()] == [6, 3, 6, 6]
    assert {module.lora_dropout["default"].p for module in modules.values()} == {0.25}
    assert modules[places[0]].scaling["default"] == pytest.approx(6 / 4**0.5)
    assert look.plan.adapter == "lora, rank 4, rslora"


def test_half_precision_holds_a_frozen_base_in_half(run):
    look = run(adapter="lora", train={"precision": "bf16"})
    assert {p.dtype for p in look.model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in look.model.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_qlora_has_a_base_of_4_bits(run):
    look = run(adapter="qlora")
    modules = [look.model.get_submodule(name).base_layer for name in adapter_of(look.model).targets]
    assert len(modules) == 4 * 7
    assert all(map(is_nf4, modules))


def test_fp8_has_a_base_of_8_bits(run):
    look = run(adapter={"kind": "lora", "base": "fp8", "rank": 4}, train={"precision": "bf16"})
    modules = [look.model.get_submodule(name).base_layer for name in adapter_of(look.model).targets]
    assert len(modules) == 4 * 7
    assert {(type(module), module.compute_dtype) for module in modules} == {(Fp8Linear, torch.bfloat16)}
    assert look.plan.adapter == "lora-fp8, rank 4"


@pytest.mark.parametrize(
    ("accelerator", "found"),
    [
        (Accelerator("cuda", (8, 0)), "this device has 8.0"),
        (Accelerator("cuda", (9, 4)), "this device has 9.4"),
        (Accelerator("mps"), "this device is of type mps"),
        (Accelerator("cuda", (8, 9)), None),
        (Accelerator("cuda", (9, 0)), None),
        (Accelerator("cpu"), None),
    ],
)
def test_fp8_is_refused_without_fp8_units(accelerator, found):
    recipe = Recipe(model="x", data={"train": "rows.csv"}, adapter={"kind": "lora", "base": "fp8"})
    case = Case(None, accelerator, "bf16", recipe)
    if found is None:
        check_settings(case)
        return
    with pytest.raises(RecipeError) as caught:
        check_settings(case)
    assert found in caught.value.problem
    assert caught.value.cure == "remove adapter.base (adapter: lora), or use adapter: qlora"


@pytest.mark.parametrize(("capability", "has_fp8"), [((8, 0), False), ((9, 0), True)])
def test_adapters_are_suggested_with_what_the_device_can_do(capability, has_fp8):
    recipe = Recipe(model="x", data={"train": "rows.csv"})
    case = Case(None, Accelerator("cuda", capability), "bf16", recipe)
    technique = AdapterTechnique()
    found = {each.words: each.spec for each in technique.suggest(plain_spec(1, "bf16"), case)}
    assert ("adapter: {kind: lora, base: fp8}" in found) is has_fp8
    assert {"adapter: lora", "adapter: qlora"} <= set(found)
    for words, spec in found.items():
        changed = technique.in_recipe(recipe, spec["adapter"])
        assert technique.values(Case(None, case.accelerator, "bf16", changed)) == (spec["adapter"],), words


@pytest.mark.parametrize("sections", [{}, {"train": {"freeze": {"*.embed_tokens": "5 steps"}}}])
def test_embeddings_on_the_host_are_refused_where_they_train(run, sections):
    assert run(memory={"offload": "embeddings"}, adapter="lora").plan.offload == "embeddings"
    with pytest.raises(RecipeError, match="the embeddings are trainable"):
        run(memory={"offload": "embeddings"}, **sections)


def test_an_own_loop_is_told_that_updates_get_lost(caplog):
    caplog.set_level("INFO", "trimtab")
    model = torch.nn.Linear(4, 4)
    engine = Engine("bf16-pure", cpu=True)
    model = engine.prepare(model)
    engine.prepare(build_optimizer("adamw", [{"params": list(model.parameters())}], lr=0.1, rounds_stochastically=True))
    assert not [message for message in caplog.messages if "bf16-pure" in message]
    engine.prepare(torch.optim.AdamW(model.parameters()))
    assert [message for message in caplog.messages if "AdamW rounds to nearest" in message]


@pytest.mark.parametrize(
    ("sections", "device", "chosen"),
    [
        ({"adapter": "qlora"}, "cuda", "paged-adamw8bit"),
        ({"adapter": "qlora"}, "cpu", "adamw"),
        ({"adapter": "lora"}, "cuda", "adamw"),
        ({"adapter": "qlora", "train": {"optimizer": "adam"}}, "cuda", "adam"),
    ],
)
def test_the_optimizer_of_choice(sections, device, chosen):
    recipe = Recipe(model="x", data={"train": "rows.csv"}, **sections)
    assert default_optimizer(recipe, Accelerator(device)) == chosen
