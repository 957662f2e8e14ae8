"""Adapters: selected modules, trainable parameters, agreement with PEFT, saving and loading."""

import copy
import json
import logging
import warnings

import pytest
import torch
from safetensors.torch import load_file

from rounding import assert_same_up_to_rounding
from tiny_models import KINDS, TEXTS, batch_of, config_of, tokenizer
from trimtab.errors import ModelError, RecipeError
from trimtab.model.adapters import Adapter, LoraSpec, adapter_of, add_adapter, load_adapter
from trimtab.model.hub import quiet_transformers
from trimtab.model.load import load_model, newly_initialized
from trimtab.techniques.recomputation import checkpoint_layers

LLAMA_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def plain(name, **settings):
    head = {"num_labels": 3} if KINDS[name] == "sequence-classification" else {}
    return load_model({**config_of(name), **settings}, KINDS[name], head, tokenizer())


def batch(name):
    found = batch_of(TEXTS)
    if KINDS[name] == "sequence-classification":
        return {**found, "labels": torch.tensor([0, 1, 2, 0, 1])}
    if name == "encoder-decoder":  # which warns where it is given labels
        return {**found, "decoder_input_ids": found["input_ids"]}
    return {**found, "labels": found["input_ids"]}


def stirred(model):
    """Change trainable parameters randomly: the adapter's product is not zero then."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def embedding_name(model):
    return next(name for name, module in model.named_modules() if module is model.get_input_embeddings())


def outcome(model, inputs):
    model.zero_grad()
    output = model(**inputs)
    loss = output.loss if "labels" in inputs else output.logits.square().mean()
    loss.backward()
    return loss.detach(), output.logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", KINDS)
def test_peft_gives_the_same_logits_loss_and_gradients(name, tmp_path):
    """PEFT reads the folder onto the base: same logits, same loss, same gradients of everything that trains."""
    import peft

    base = plain(name)
    model = copy.deepcopy(base)
    adapter = add_adapter(model, LoraSpec(rank=3, alpha=5, trains=[embedding_name(model)]))
    stirred(model).eval()
    adapter.save(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")  # of an encoder and a decoder
        theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path, is_trainable=True).eval()
    loss, logits, gradients = outcome(model, batch(name))
    their_loss, their_logits, their_gradients = outcome(theirs, batch(name))
    assert_same_up_to_rounding(loss, their_loss, num_roundings=16)
    assert_same_up_to_rounding(logits, their_logits, num_roundings=64)
    assert not torch.allclose(logits, base(**batch(name)).logits, atol=1e-3)
    plainly = {}
    for their_name, gradient in their_gradients.items():
        own = their_name.removeprefix("base_model.model.").replace("modules_to_save.default.", "")
        plainly[own] = gradient
    assert any("lora_A" in own for own in gradients)
    tied = {id(p) for p in model.parameters() if p.requires_grad}
    for own, gradient in gradients.items():
        names = [other for other, p in model.named_parameters(remove_duplicate=False) if p is model.get_parameter(own)]
        parts = [plainly[other] for other in names if plainly.get(other) is not None]
        if gradient is None:  # a pooler that the model does not use
            assert not parts
            continue
        # What is one weight here may be several there.
        distinct = {id(part): part for part in parts}
        torch.testing.assert_close(gradient, sum(distinct.values()), rtol=1e-4, atol=1e-6)
    assert len(tied) == len(gradients)


@pytest.mark.parametrize("name", KINDS)
def test_only_the_adapter_is_written(name, tmp_path):
    model = plain(name)
    adapter = add_adapter(model, LoraSpec(rank=2))
    adapter.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    stored = load_file(tmp_path / "adapter_model.safetensors")
    whole = {name for name in stored if "lora_" not in name}
    expected = {"base_model.model.classifier.weight", "base_model.model.classifier.bias"} if name == "bert" else set()
    assert whole == expected
    assert len(stored) == 2 * len(adapter.targets) + len(expected)
    assert trainable(model) == set(adapter.tensors())
    assert sum(tensor.numel() for tensor in stored.values()) == adapter.num_parameters


@pytest.mark.parametrize("name", KINDS)
def test_save_and_load(name, tmp_path):
    base = plain(name)
    model = copy.deepcopy(base)
    adapter = add_adapter(model, LoraSpec(rank=3, ranks={"*0*": 2}, alphas={"*0*": 9}, trains=[embedding_name(model)]))
    stirred(model).eval()
    adapter.save(tmp_path)
    for trains in (False, True):
        again = copy.deepcopy(base)
        read = load_adapter(again, tmp_path, trainable=trains)
        assert adapter_of(again) is read
        with torch.no_grad():
            assert torch.equal(again(**batch(name)).logits, model(**batch(name)).logits)
        assert trainable(again) == (trainable(model) if trains else set())
        assert read.targets == adapter.targets
    ours, read_tensors = adapter.tensors(), read.tensors()
    assert ours.keys() == read_tensors.keys()
    read.save(tmp_path / "second")
    first, second = (load_file(path / "adapter_model.safetensors") for path in (tmp_path, tmp_path / "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_load_an_adapter_saved_by_peft(tmp_path):
    import peft

    base = plain("llama", tie_word_embeddings=True)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "up_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True
    )
    theirs = stirred(peft.get_peft_model(copy.deepcopy(base), config)).eval()
    theirs.save_pretrained(tmp_path)
    model = copy.deepcopy(base)
    adapter = load_adapter(model, tmp_path, trainable=True)
    assert_same_up_to_rounding(model(**batch("llama")).logits, theirs(**batch("llama")).logits, num_roundings=64)
    assert {name.rpartition(".")[2] for name in adapter.targets} == {"q_proj", "up_proj"}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "model.embed_tokens.weight" in trainable(model)
    stirred(model)
    adapter.save(tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "ours").eval()
    assert_same_up_to_rounding(model(**batch("llama")).logits, again(**batch("llama")).logits, num_roundings=64)


def test_save_given_weights(tmp_path):
    """A copy that waited for room on the disk is written in the place of what the model has by then."""
    model = plain("gpt2")
    adapter = add_adapter(model, LoraSpec(rank=2, trains=["transformer.wte"]))
    waiting = {name: tensor.detach().clone() for name, tensor in adapter.tensors().items()}
    stirred(model)
    adapter.save(tmp_path, weights={**waiting, "something.else": torch.zeros(1)})
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert len(stored) == len(waiting)
    for name, tensor in waiting.items():
        assert torch.equal(stored["base_model.model." + name.replace(".default", "")], tensor)


def test_a_new_adapter_does_not_change_outputs():
    base = plain("llama")
    model = copy.deepcopy(base)
    add_adapter(model, LoraSpec(dropout=0.5))
    assert not model.training
    assert torch.equal(model(**batch("llama")).logits, base(**batch("llama")).logits)


def test_initial_values_do_not_depend_on_the_dtype_of_the_base():
    drawn = []
    for dtype in (torch.float32, torch.bfloat16):
        model = plain("llama").to(dtype)
        torch.manual_seed(4)
        drawn.append(add_adapter(model, LoraSpec(rank=2)).tensors())
    for name, tensor in drawn[0].items():
        assert tensor.dtype is torch.float32
        assert torch.equal(tensor, drawn[1][name])
        assert bool(tensor.any()) == ("lora_A" in name)


def test_initial_values_are_distributed_as_in_peft():
    import peft

    model, theirs = plain("llama", hidden_size=512), plain("llama", hidden_size=512)
    add_adapter(model, LoraSpec(rank=8, targets=["q_proj"]))
    peft.inject_adapter_in_model(peft.LoraConfig(r=8, target_modules=["q_proj"]), theirs)
    ours, other = (m.model.layers[0].self_attn.q_proj.lora_A["default"].weight for m in (model, theirs))
    assert ours.std().item() == pytest.approx(other.std().item(), rel=0.05)
    assert ours.abs().max().item() == pytest.approx(other.abs().max().item(), rel=0.05)


class TestTargets:
    """Which modules get an adapter."""

    def targets(self, name="llama", **settings):
        model = plain(name)
        adapter = add_adapter(model, LoraSpec(rank=2, **settings))
        assert set(adapter.targets) == {n.rpartition(".lora_A")[0] for n in trainable(model) if ".lora_A." in n}
        return adapter.targets

    def test_all_linear(self):
        expected = [
            f"model.layers.{layer}.{'self_attn' if name in LLAMA_LINEAR[:4] else 'mlp'}.{name}"
            for layer in (0, 1)
            for name in LLAMA_LINEAR
        ]
        assert sorted(self.targets()) == sorted(expected)

    def test_mamba_leaves_out_what_peft_refuses(self, caplog):
        """A fused kernel reads the weight of out_proj without calling it."""
        caplog.set_level(logging.INFO, logger="trimtab")
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 16, "state_size": 8}
        settings = {"model_type": "mamba2", "n_groups": 1, "vocab_size": 300, **sizes}
        model = load_model(settings, "causal-lm", {}, tokenizer())
        adapter = add_adapter(model, LoraSpec(rank=2))
        assert {name.rpartition(".")[2] for name in adapter.targets} == {"in_proj"}
        assert "no adapter on out_proj" in caplog.text

    def test_heads_get_no_adapter(self):
        assert not [name for name in self.targets("encoder-decoder") if "cls" in name]
        assert not [name for name in self.targets("roberta") if "lm_head" in name]
        assert "bert.pooler.dense" in self.targets("bert")
        assert not [name for name in self.targets("t5") if "lm_head" in name]

    @pytest.mark.parametrize(
        ("patterns", "num_modules"),
        [
            ("q_proj", 2),
            (["q_proj", "v_proj"], 4),
            (["*_proj"], 14),
            (["model.layers.1.*"], 7),
            (["model.layers.1"], 7),
            (["*self_attn"], 8),
            (["*.0.mlp.up_proj"], 1),
            (["model.layers.[01].self_attn.q_proj", "q_proj"], 2),
        ],
    )
    def test_patterns(self, patterns, num_modules):
        assert len(self.targets(targets=patterns)) == num_modules

    @pytest.mark.parametrize(("layers", "kept"), [((0, 0), {"0"}), ((0, 1), {"0", "1"}), ((-1, -1), {"1"})])
    def test_layers(self, layers, kept):
        found = self.targets(layers=layers)
        assert {name.split(".")[2] for name in found} == kept
        assert len(found) == 7 * len(kept)

    def test_layers_of_an_encoder_and_a_decoder(self):
        assert {name.split(".")[0] for name in self.targets("t5", layers=(0, 0))} == {"encoder"}
        assert {name.split(".")[0] for name in self.targets("t5", layers=(1, 1))} == {"decoder"}

    @pytest.mark.parametrize(
        ("settings", "problem", "cure"),
        [
            ({"targets": ["q_prj"]}, "adapter.targets: 'q_prj' matches no module", "q_proj"),
            (
                {"targets": ["zzz"]},
                "matches no module of LlamaForCausalLM",
                "there are model, .*layers, self_attn, q_proj",
            ),
            ({"targets": ["embed_tokens"]}, "a Embedding without linear", "all-linear"),
            ({"targets": ["lm_head"]}, "lm_head is the output layer", r"adapter.trains: \[lm_head\]"),
            ({"targets": ["q_proj"], "trains": ["*q_proj"]}, "which is trained in full", "list it either"),
            ({"trains": ["embed_token"]}, "adapter.trains: 'embed_token' matches no module", "embed_tokens"),
            ({"layers": (0, 2)}, "is not a range of the 2 layers", r"\[0, 1\]"),
            ({"layers": (1, 0)}, "is not a range of the 2 layers", r"\[0, 1\]"),
            ({"ranks": {"k_prj": 4}}, "adapter.ranks: 'k_prj' matches no module", "k_proj"),
            ({"targets": ["q_proj"], "alphas": {"k_proj": 4}}, "adapter.alphas: 'k_proj' matches no", "q_proj"),
            ({"rank": 0}, "adapter.rank is 0", "at least 1"),
            ({"ranks": {"q_proj": 0}}, "adapter.ranks.q_proj is 0", "at least 1"),
            ({"dropout": 1.0}, "adapter.dropout is 1.0", "up to"),
        ],
    )
    def test_mistakes(self, settings, problem, cure):
        with pytest.raises(RecipeError, match=problem) as failure:
            add_adapter(plain("llama"), LoraSpec(**({"rank": 2} | settings)))
        import re

        assert re.search(cure, failure.value.cure)

    def test_twice(self):
        model = plain("llama")
        add_adapter(model, LoraSpec(rank=2))
        with pytest.raises(RecipeError, match="already has an adapter"):
            add_adapter(model, LoraSpec(rank=2))

    def test_fused_experts_without_adapter_are_reported(self, caplog):
        caplog.set_level(logging.INFO, logger="trimtab")
        config = {**config_of("llama"), "model_type": "mixtral", "num_local_experts": 4}
        model = load_model(config, "causal-lm", {}, tokenizer())
        adapter = add_adapter(model, LoraSpec(rank=2))
        assert {name.rpartition(".")[2] for name in adapter.targets} == {"q_proj", "k_proj", "v_proj", "o_proj"}
        (line,) = [message for message in caplog.messages if "leaves out" in message]
        assert "(MixtralExperts, MixtralTopKRouter); LoRA adapts experts with adapter.experts: true" in line


def test_ranks_and_alphas(tmp_path):
    model = plain("llama")
    spec = LoraSpec(rank=4, ranks={"*.mlp.*": 2, "down_proj": 6}, alphas={"q_proj": 3})
    adapter = add_adapter(model, spec)
    expected = {"q_proj": (4, 3), "k_proj": (4, 8), "up_proj": (2, 4), "down_proj": (6, 12)}
    for name in adapter.targets:
        layer = model.get_submodule(name)
        last = name.rpartition(".")[2]
        if last in expected:
            rank, alpha = expected[last]
            assert (layer.r["default"], layer.lora_alpha["default"]) == (rank, alpha)
            assert layer.scaling["default"] == alpha / rank
            assert layer.lora_A["default"].weight.shape[0] == rank
    adapter.save(tmp_path)
    stored = json.loads((tmp_path / "adapter_config.json").read_text())
    assert stored["r"] == 4
    assert sorted(stored["target_modules"]) == sorted(LLAMA_LINEAR)
    assert set(stored["rank_pattern"].values()) == {2, 6}


def test_rslora():
    model = plain("llama")
    add_adapter(model, LoraSpec(rank=16, rslora=True))
    assert model.model.layers[0].mlp.up_proj.scaling["default"] == 32 / 4


class TestWholeModules:
    """Modules that are trained in full."""

    def test_no_second_copy(self):
        model = plain("llama")
        before = sum(parameter.numel() for parameter in model.parameters())
        embeddings = model.model.embed_tokens
        adapter = add_adapter(model, LoraSpec(rank=2, trains=["embed_tokens", "lm_head"]))
        assert model.model.embed_tokens is embeddings
        added = 2 * sum(p.numel() for name, p in model.named_parameters() if "lora_A" in name)
        assert sum(parameter.numel() for parameter in model.parameters()) < before + 2 * added
        assert {"model.embed_tokens.weight", "lm_head.weight"} <= trainable(model)
        assert adapter.trains == ("lm_head", "model.embed_tokens")

    @pytest.mark.parametrize("named", ["transformer.wte", "lm_head"])
    def test_tied_weights_by_either_name(self, named, tmp_path):
        import peft

        base = plain("gpt2")
        model = copy.deepcopy(base)
        adapter = add_adapter(model, LoraSpec(rank=2, trains=[named]))
        assert model.lm_head.weight is model.transformer.wte.weight
        assert "transformer.wte.weight" in trainable(model)
        stirred(model).eval()
        adapter.save(tmp_path)
        theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
        assert_same_up_to_rounding(model(**batch("gpt2")).logits, theirs(**batch("gpt2")).logits, num_roundings=64)

    def test_newly_initialized_modules_are_trained_in_full(self, tmp_path):
        """A pooler that the files lack is part of the base, and random."""
        with quiet_transformers():
            load_model(config_of("bert"), "masked-lm", {}, tokenizer()).save_pretrained(tmp_path)
        model = load_model(str(tmp_path), "sequence-classification", {"num_labels": 2}, tokenizer())
        adapter = add_adapter(model, LoraSpec(rank=2))
        assert adapter.trains == ("bert.pooler", "classifier")
        assert newly_initialized(model) <= trainable(model)
        assert not [name for name in adapter.targets if "pooler" in name]
        assert adapter.base.name == str(tmp_path)

    def test_a_new_part_of_a_head_trains_if_the_head_is_named(self, tmp_path):
        """The head for masked tokens shares its output layer with the embeddings: it is new but for that."""
        with quiet_transformers():
            load_model(config_of("bert"), "sequence-classification", {}, tokenizer()).save_pretrained(tmp_path)
        model = load_model(str(tmp_path), "masked-lm", {}, tokenizer())
        with pytest.raises(RecipeError, match="must be trained") as refused:
            add_adapter(copy.deepcopy(model), LoraSpec(rank=2))
        named = refused.value.cure.rpartition("[")[2].rstrip("]")
        add_adapter(model, LoraSpec(rank=2, trains=[named]))
        assert newly_initialized(model) <= trainable(model)

    def test_a_whole_head_is_one_module(self):
        head = {"num_labels": 2}
        model = load_model(config_of("roberta"), "sequence-classification", head, tokenizer())
        assert add_adapter(model, LoraSpec(rank=2)).trains == ("classifier",)

    @pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
    @pytest.mark.parametrize("autocast", [True, False])
    def test_trainable_parameters_are_fp32_in_a_half_precision_base(self, name, autocast):
        model = plain(name).to(torch.bfloat16)
        add_adapter(model, LoraSpec(rank=2, trains=[embedding_name(model)]))
        assert {model.get_parameter(n).dtype for n in trainable(model)} == {torch.float32}
        assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
        stirred(model)
        seen = []
        blocks = [m for n, m in model.named_modules() if n.endswith(("layers.1", "layer.1", "h.1"))]
        blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(**batch(name)).loss
        loss.backward()
        assert loss.isfinite()
        assert seen == [torch.bfloat16]
        assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters() if p.requires_grad)


def test_copies_share_no_memory():
    model = plain("llama")
    adapter = add_adapter(model, LoraSpec(rank=2, trains=["embed_tokens"]))
    stirred(model)
    copied = copy.deepcopy(model)
    other = adapter_of(copied)
    assert isinstance(other, Adapter)
    assert other is not adapter
    assert torch.equal(copied(**batch("llama")).logits, model(**batch("llama")).logits)
    stirred(copied)
    assert not torch.equal(copied(**batch("llama")).logits, model(**batch("llama")).logits)
    theirs, ours = other.tensors(), adapter.tensors()
    assert theirs.keys() == ours.keys()
    assert all(tensor is copied.get_parameter(name) for name, tensor in theirs.items())
    assert not torch.equal(theirs["model.embed_tokens.weight"], ours["model.embed_tokens.weight"])


def test_found_inside_wrappers():
    model = plain("llama")
    assert adapter_of(model) is None
    adapter = add_adapter(model, LoraSpec(rank=2))

    class Wrapper(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.module = inner

    assert adapter_of(Wrapper(model)) is adapter
    assert adapter_of(torch.nn.Linear(2, 2)) is None


@pytest.mark.parametrize("which", ["all", "ops", {"every": 2}])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_gradient_checkpointing(name, which):
    model = plain(name)
    add_adapter(model, LoraSpec(rank=2, dropout=0.2))
    stirred(model).train()
    outcomes = []
    for chosen in ("none", which):
        checkpoint_layers(model, chosen)
        torch.manual_seed(3)
        outcomes.append(outcome(model, batch(name)))
    (loss, _, gradients), (other_loss, _, other_gradients) = outcomes
    assert torch.equal(loss, other_loss)
    for key, gradient in gradients.items():
        assert torch.equal(gradient, other_gradients[key]), key


def test_a_step_trains_the_adapter_alone():
    model = plain("llama")
    add_adapter(model, LoraSpec(rank=2))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):  # the first matrix has a gradient once the second is not zero
        outcome(model, batch("llama"))
        optimizer.step()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == trainable(model)


class TestReading:
    """Folders that are no adapter of this model."""

    @pytest.fixture
    def folder(self, tmp_path):
        model = plain("llama")
        add_adapter(model, LoraSpec(rank=2, trains=["embed_tokens"])).save(tmp_path)
        return tmp_path

    def test_no_adapter(self, tmp_path):
        with pytest.raises(ModelError, match="contains no adapter"):
            load_adapter(plain("llama"), tmp_path)

    def test_another_model(self, folder):
        with pytest.raises(ModelError, match="embed_tokens"):
            load_adapter(plain("gpt2"), folder)

    def test_another_size(self, folder):
        with pytest.raises(ModelError, match="embed_tokens.weight is"):
            load_adapter(plain("llama", hidden_size=64), folder)

    def test_another_kind(self, folder):
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "LOHA"}))
        with pytest.raises(ModelError, match=r"LOHA|PEFT cannot use"):
            load_adapter(plain("llama"), folder)

    def test_a_tensor_is_missing(self, folder):
        from safetensors.torch import save_file

        tensors = load_file(folder / "adapter_model.safetensors")
        del tensors["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"]
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=r"up_proj.lora_A.*missing in it"):
            load_adapter(plain("llama"), folder)


class TestNewTokens:
    """A tokenizer with more tokens than the base has."""

    @pytest.fixture
    def folder(self, tmp_path):
        with quiet_transformers():
            small = load_model({**config_of("llama"), "vocab_size": 290}, "causal-lm", {}, None)
            small.save_pretrained(tmp_path)
        return str(tmp_path)

    def test_new_rows_are_deterministic(self, folder):
        rows = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            model = load_model(folder, "causal-lm", {}, tokenizer())
            rows.append((model.model.embed_tokens.weight[290:], model.lm_head.weight[290:]))
        assert len(rows[0][0]) == 10
        assert all(torch.equal(one, other) for one, other in zip(*rows, strict=True))
        assert torch.allclose(rows[0][0][3], model.model.embed_tokens.weight[:290].mean(0))

    @pytest.mark.parametrize("trains", [[], ["embed_tokens"]])
    def test_frozen_new_rows_are_reported(self, folder, trains, caplog):
        caplog.set_level(logging.INFO, logger="trimtab")
        add_adapter(load_model(folder, "causal-lm", {}, tokenizer()), LoraSpec(rank=2, trains=trains))
        lines = [message for message in caplog.messages if "10 new rows" in message]
        assert len(lines) == (not trains)


def test_load_in_half_precision(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="trimtab")
    with quiet_transformers():
        plain("llama").save_pretrained(tmp_path)
    for source in (str(tmp_path), config_of("llama")):
        model = load_model(source, "causal-lm", {}, tokenizer(), dtype=torch.bfloat16, device="cpu")
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert "parameters in bf16" in caplog.messages[-1]


@pytest.mark.usefixtures("process_group")
def test_in_ddp():
    """The reducer sees every gradient of the adapter, although the products are computed in place."""
    model = plain("llama")
    add_adapter(model, LoraSpec(rank=2))
    stirred(model)
    expected = outcome(copy.deepcopy(model), batch("llama"))
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    assert adapter_of(wrapped) is adapter_of(model)
    loss, _, gradients = outcome(wrapped, batch("llama"))
    assert torch.equal(loss, expected[0])
    assert all(torch.equal(expected[2][name.removeprefix("module.")], g) for name, g in gradients.items())
