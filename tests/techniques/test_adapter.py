"""Adapters of a recipe, from training to prediction: DoRA, IA3, PiSSA, OLoRA, LoRA+, side networks, virtual tokens."""

from functools import partial

import pytest
import torch

from rounding import assert_same_up_to_rounding
from tiny_runs import NO_DROPOUT, reviews, write_csv
from trimtab import Recipe, fit, load, resume
from trimtab.commands.cluster import cluster
from trimtab.commands.export import export
from trimtab.commands.merge import merge
from trimtab.commands.quantize import quantize
from trimtab.compress.clustering import ClusterSettings
from trimtab.errors import ModelError, RecipeError
from trimtab.model.adapters import adapter_of
from trimtab.techniques.adapter import AdapterTechnique
from trimtab.techniques.apply import plain_spec

KINDS = {
    "dora": {"kind": "lora", "rank": 2, "dora": True},
    "ia3": {"kind": "ia3"},
    "pissa": {"kind": "lora", "rank": 2, "init": "pissa"},
    "olora": {"kind": "lora", "rank": 2, "init": "olora", "lr_ratio": 4},
}
SOME_KINDS = ["dora", "ia3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("pissa", "olora"))]
TEXTS = ["the film was good", "a very long and dull story"]


class Look:
    """Keeps what a run trains with."""

    def on_step(self, state):
        self.model, self.optimizer = state.model, state.optimizer.optimizer


@pytest.fixture
def train(own_folder, tiny):
    rows = write_csv(own_folder / "rows.csv", reviews(40))

    def run(adapter, out="run", **sections):
        look = Look()
        recipe = Recipe(
            model=tiny.folder("bert", **NO_DROPOUT["bert"]),
            data={"train": str(rows)},
            adapter=adapter,
            train={"max_steps": 4, "batch_size": 8, "lr": 1e-2} | sections.pop("train", {}),
            out=str(own_folder / out),
            track="none",
            **sections,
        )
        look.result = fit(recipe, callbacks=[look], progress="quiet", device="cpu")
        return look

    return run


def logits(model, tokenizer):
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        return model.eval()(**batch).logits


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_from_training_to_a_merged_model(train, own_folder, kind):
    look = train(KINDS[kind], evaluate={"every": "4 steps"})
    loaded = load(look.result.best, device="cpu")
    expected = logits(look.model, loaded.tokenizer)
    assert_same_up_to_rounding(logits(loaded.model, loaded.tokenizer), expected, num_roundings=256)
    assert len(loaded.predict(TEXTS)) == 2
    merged = merge(own_folder / "run", own_folder / "merged", num_rows=4, device="cpu")
    assert merged.closeness.agreement == 1
    again = load(own_folder / "merged", device="cpu")
    assert adapter_of(again.model) is None
    assert_same_up_to_rounding(logits(again.model, again.tokenizer), expected, num_roundings=256)


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_a_run_can_be_longer(train, own_folder, kind):
    train(KINDS[kind])
    longer = resume(own_folder / "run", sets=["train.max_steps=6"], progress="quiet", device="cpu")
    assert longer.fit.step == 6


class TestSideNetwork:
    """`adapter: side`, from training to prediction."""

    SIDE = {"kind": "side", "reduction": 4}

    def test_from_training_to_predicting(self, train, own_folder):
        look = train(self.SIDE, evaluate={"every": "4 steps"})
        best = look.result.best
        loaded = load(best, device="cpu")
        assert torch.equal(logits(loaded.model, loaded.tokenizer), logits(look.model, loaded.tokenizer))
        assert len(loaded.predict(TEXTS)) == 2
        assert loaded.evaluate(str(own_folder / "rows.csv")).metrics
        assert look.result.plan.adapter == "side, reduction 4, every 1"
        assert "Only trimtab can load it" in (best / "README.md").read_text()
        again = loaded.save(own_folder / "again")
        twin = load(again, device="cpu")
        assert torch.equal(logits(twin.model, twin.tokenizer), logits(look.model, twin.tokenizer))

    @pytest.mark.parametrize(
        "command",
        [merge, quantize, partial(cluster, settings=ClusterSettings(bits=4)), partial(export, to="onnx")],
        ids=["merge", "quantize", "cluster", "export"],
    )
    def test_it_cannot_be_merged(self, train, own_folder, command):
        train(self.SIDE)
        with pytest.raises(ModelError, match="is a side network: it runs in addition to the base") as refused:
            command(str(own_folder / "run"), own_folder / "target")
        assert "trimtab predict" in refused.value.cure

    def test_it_is_no_start_of_another_run(self, train, own_folder):
        train(self.SIDE)
        with pytest.raises(ModelError, match="contains only an adapter") as refused:
            fit(Recipe(model=str(own_folder / "run"), data={"train": "rows.csv"}), progress="quiet", device="cpu")
        assert "train its base again" in refused.value.cure

    def test_compiled_blocks_are_refused(self, train):
        with pytest.raises(RecipeError, match="adapter: side runs the blocks of the base without gradients"):
            train(self.SIDE, train={"compile": "blocks"})

    def test_without_padding(self, train):
        """Tokens are computed alone, so rows that are one sequence have the same losses."""
        weights = [
            adapter_of(
                train(
                    self.SIDE,
                    out=padding,
                    memory={"padding": padding},
                    train={"optimizer": "sgd", "lr": 0.1, "max_grad_norm": None},
                ).model
            ).tensors()
            for padding in ("longest", "none")
        ]
        for name, tensor in weights[0].items():
            size = max(1.0, float(tensor.detach().abs().max()))
            assert_same_up_to_rounding(weights[1][name], tensor, num_roundings=64, size=size)


class TestVirtualTokens:
    """`adapter: prompt` and `adapter: prefix`, from training to generation."""

    @pytest.fixture(params=["prefix", pytest.param("prompt", marks=pytest.mark.slow)])
    def kind(self, request):
        return request.param

    @pytest.fixture
    def tune(self, own_folder, tiny, kind):
        rows = write_csv(own_folder / "rows.csv", reviews(40))

        def run(out="run", **sections):
            look = Look()
            recipe = Recipe(
                model=tiny.folder("gpt2", **NO_DROPOUT["gpt2"]),
                task="causal-lm",
                data={"train": str(rows), "text": "text"},
                adapter={"kind": kind, "tokens": 4} | sections.pop("adapter", {}),
                train={"max_steps": 4, "batch_size": 8, "lr": 1e-2} | sections.pop("train", {}),
                out=str(own_folder / out),
                track="none",
                **sections,
            )
            look.result = fit(recipe, callbacks=[look], progress="quiet", device="cpu")
            return look

        return run

    def test_from_training_to_generating(self, tune, kind, own_folder):
        look = tune()
        loaded = load(look.result.best, device="cpu")
        assert look.result.plan.adapter == f"{kind}, 4 tokens"
        assert torch.equal(loaded.model.virtual_tokens.weight, look.model.virtual_tokens.weight)
        assert isinstance(loaded.generate("the film", max_new_tokens=4), str)
        assert resume(own_folder / "run", sets=["train.max_steps=6"], progress="quiet", device="cpu").fit.step == 6
        for command in (merge, quantize):
            with pytest.raises(ModelError, match="contains virtual tokens, which are prepended to each row"):
                command(str(own_folder / "run"), own_folder / "target")

    def test_rows_leave_room_for_the_virtual_tokens(self, tune, caplog):
        caplog.set_level("INFO", logger="trimtab")
        tune(limits={"train": 1})
        loaded = load("run", device="cpu")
        assert loaded.max_length == 60, "of 64 positions"

    def test_more_virtual_tokens_than_positions_are_refused(self, tune):
        with pytest.raises(RecipeError, match=r"adapter\.tokens is 63, but the model has 64 positions"):
            tune(adapter={"tokens": 63})

    def test_rows_are_padded(self, tune, caplog):
        caplog.set_level("INFO", logger="trimtab")
        look = tune(memory={"padding": "none"})
        assert look.result.plan.padding == "longest"
        assert "because virtual tokens are put before each row" in caplog.text

    def test_techniques_change_nothing(self, tune):
        """Chunked loss, recomputation and micro-batches: the head sees rows without virtual tokens."""
        sgd = {"optimizer": "sgd", "lr": 0.5, "max_grad_norm": None}
        plain = tune(train=sgd).model.virtual_tokens.weight
        memory = {"loss": "chunked", "gradient_checkpointing": "all", "micro_batch": 3}
        found = tune(out="second", train=sgd, memory=memory).model.virtual_tokens.weight
        assert_same_up_to_rounding(found, plain, num_roundings=64)


def test_compiled_blocks_get_no_prefix():
    spec = plain_spec(1, "bf16", adapter="prefix", compile="blocks")
    refusal = AdapterTechnique().refuse(spec, None)
    assert "keys and values through a cache, which train.compile: blocks does not support" in refusal


def test_second_matrices_have_a_rate_of_their_own(train, own_folder):
    """Each group keeps its multiple when a run is resumed with another rate; a new head has `train.lr`."""
    look = train({"kind": "lora", "rank": 2, "lr_ratio": 16}, train={"schedule": "constant"})
    rates = {id(p): group["lr"] for group in look.optimizer.param_groups for p in group["params"]}
    found = {name: rates[id(p)] for name, p in look.model.named_parameters() if p.requires_grad}
    assert {rate for name, rate in found.items() if "lora_B" in name} == {0.16}
    assert {rate for name, rate in found.items() if "lora_B" not in name} == {0.01}
    assert {name for name in found if "classifier" in name}
    again = Look()
    resume(
        own_folder / "run",
        sets=["train.max_steps=6", "train.lr=0.001"],
        callbacks=[again],
        progress="quiet",
        device="cpu",
    )
    assert sorted({group["lr"] for group in again.optimizer.param_groups}) == pytest.approx([0.001, 0.016])


def test_plans_name_what_differs(train):
    assert train(KINDS["dora"]).result.plan.adapter == "lora, rank 2, dora"
    assert train(KINDS["pissa"], out="second").result.plan.adapter == "lora, rank 2, pissa"
    assert train("ia3", out="third").result.plan.adapter == "ia3"


def test_another_adapter_is_another_run(train, own_folder):
    train(KINDS["pissa"])
    with pytest.raises(RecipeError, match=r"adapter\.init: 'pissa' → 'zero'"):
        resume(own_folder / "run", sets=["train.max_steps=6", "adapter.init=zero"], progress="quiet", device="cpu")


def test_a_recipe_of_before_means_the_same(train, own_folder):
    """`targets: all-linear` was the default of LoRA."""
    train({"kind": "lora", "rank": 2})
    sets = ["train.max_steps=6", "adapter.targets=all-linear"]
    assert resume(own_folder / "run", sets=sets, progress="quiet", device="cpu").fit.step == 6


def test_a_damaged_config_is_reported(train, own_folder):
    train({"kind": "lora", "rank": 2})
    (own_folder / "run" / "best" / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"adapter_config\.json cannot be read"):
        merge(own_folder / "run", own_folder / "merged", device="cpu")
