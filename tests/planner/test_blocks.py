"""A few blocks traced and the rest derived gives the same record as all of them traced."""

from collections import Counter
from types import SimpleNamespace

import pytest

from trimtab import Recipe
from trimtab.model.blocks import stacks_of
from trimtab.planner.memory import predict
from trimtab.planner.shapes import BatchShape
from trimtab.planner.trace import model_trace
from trimtab.planner.trace.blocks import NotPeriodic, Repeat, extend, find_repeat
from trimtab.planner.trace.cuda import Gpu
from trimtab.planner.trace.plain_step import trace_plain_step
from trimtab.planner.trace.recipe_step import StepTracer
from trimtab.planner.trace.shortened_model import shorten
from trimtab.techniques.apply import plain_spec, reaches_far
from trimtab.techniques.base import as_text

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 200}
CONFIGS = {
    "llama": {"model_type": "llama", "num_hidden_layers": 8, "num_key_value_heads": 2, **SMALL},
    "bert": {"model_type": "bert", "num_hidden_layers": 7, **SMALL},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 8, "n_head": 4, "vocab_size": 200},
    "t5": {
        "model_type": "t5",
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 7,
        "num_decoder_layers": 6,
        "num_heads": 4,
        "vocab_size": 200,
        "decoder_start_token_id": 0,
    },
    "qwen3": {"model_type": "qwen3", "num_hidden_layers": 7, "num_key_value_heads": 2, "head_dim": 16, **SMALL},
    # every third block sees the whole text, the others their neighbourhood
    "modernbert": {
        "model_type": "modernbert",
        "num_hidden_layers": 16,
        "local_attention": 8,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0),
        **SMALL,
    },
}
DATA_DEPENDENT = {  # shapes depend on where tokens are, or on the experts that they choose
    "longformer": {"model_type": "longformer", "num_hidden_layers": 7, "attention_window": 8, **SMALL},
    "switch_transformers": CONFIGS["t5"] | {"model_type": "switch_transformers", "num_layers": 14, "num_experts": 4},
}
CAUSAL = SimpleNamespace(
    loss_kind="token-cross-entropy", shifts_labels=True, model_kind="causal-lm", head=dict, name="causal-lm"
)
SEQ2SEQ = SimpleNamespace(
    loss_kind="token-cross-entropy", shifts_labels=False, model_kind="seq2seq-lm", head=dict, name="seq2seq"
)
CLASSIFY = SimpleNamespace(
    loss_kind="cross-entropy",
    shifts_labels=False,
    model_kind="sequence-classification",
    head=lambda: {"num_labels": 2},
    name="classify",
)
TASKS = {"bert": CLASSIFY, "modernbert": CLASSIFY, "longformer": CLASSIFY} | dict.fromkeys(
    ("t5", "switch_transformers"), SEQ2SEQ
)
# the clip of gradients has a number for each tensor of the model, in lists that are as long as there are tensors
OF_THE_CLIP = {"aten._foreach_norm", "aten.stack", "aten.linalg_vector_norm"}


@pytest.fixture(scope="module")
def tracers():
    """A tracer for a model and an adapter, made when it is first asked for."""
    made = {}

    def tracer(name, adapter="none"):
        if (name, adapter) not in made:
            recipe = Recipe.model_validate(
                {
                    "model": {"config": (CONFIGS | DATA_DEPENDENT)[name], "tokenizer": "train"},
                    "data": {"train": "text.jsonl"},
                    "adapter": SETTINGS.get(adapter, adapter),
                }
            )
            made[name, adapter] = StepTracer(recipe, TASKS.get(name, CAUSAL), Gpu())
        return made[name, adapter]

    return tracer


def sizes(trace):
    """Births (their size) and deaths (0) in order, less those of the clip."""
    return [event.size for event in trace.events if trace.births[event.storage].op not in OF_THE_CLIP]


def ops(trace):
    return Counter(op for op in trace.ops if op.name not in OF_THE_CLIP)


def assert_same(derived, traced):
    assert sizes(derived) == sizes(traced)
    assert ops(derived) == ops(traced)
    one, other = predict(derived), predict(traced)
    assert one.allocated == other.allocated
    assert one.parts == other.parts
    assert one.stage == other.stage
    assert [mark.name for mark in derived.marks] == [mark.name for mark in traced.marks]
    assert len(derived.gradients) == len(traced.gradients)


SETTINGS = {
    "lora-fp8": {"kind": "lora", "base": "fp8"},
    "dora": {"kind": "lora", "dora": True},
    "qdora": {"kind": "qlora", "dora": True},
    "prompt": {"kind": "prompt", "tokens": 4},
    "pissa": {"kind": "lora", "init": "pissa", "lr_ratio": 16},
}
EVERY, SOME = {"every": 2}, {"layers": [0, -1]}
ADAPTED = [("lora", "none"), ("lora", "all"), ("qlora", "all"), ("lora-fp8", "all"), ("lora-fp8", "ops")]
ADAPTED += [("dora", "none"), ("dora", "all"), ("qdora", "all"), ("ia3", "none"), ("ia3", "all"), ("pissa", "none")]
ADAPTED += [("prompt", "none"), ("prompt", "all")]
DECODERS = ("llama", "gpt2", "qwen3")
CASES = [
    (name, *case)
    for name in CONFIGS
    for case in [*(("none", w) for w in ("none", "all", EVERY, SOME, "ops")), *ADAPTED]
    if case[0] != "prompt" or name in DECODERS
    if (name, case[0]) != ("modernbert", "ia3")  # PEFT does not know which modules those are
]
CASES += [(name, "none", which) for name in DATA_DEPENDENT for which in ("none", "all")]
# of each kind something, in every run of the tests; all of them in the slow one
QUICK = [
    ("llama", "lora", "all"),
    ("llama", "none", SOME),
    ("gpt2", "ia3", "none"),
    ("llama", "prompt", "all"),
    ("gpt2", "none", EVERY),
]


def _cases():
    for case in CASES:
        yield pytest.param(*case, id="-".join(map(str, case)), marks=[] if case in QUICK else [pytest.mark.slow])


def note_failures(monkeypatch):
    """A list of every trace that could not be derived, after which the whole model is traced."""
    failures = []

    def noted(*parts):
        try:
            return extend(*parts)
        except NotPeriodic as error:
            failures.append(error)
            raise

    monkeypatch.setattr(model_trace, "extend", noted)
    return failures


@pytest.mark.slow
@pytest.mark.parametrize("which", ["none", "all"])
def test_compiled_blocks_with_adapters_are_derived(tracers, which, monkeypatch):
    """The input of the first block has no gradient, so the first block is another graph."""
    tracer, failures = tracers("llama", "lora"), note_failures(monkeypatch)
    spec = plain_spec(2, "bf16", gradient_checkpointing=which, adapter="lora", compile="graphs")
    batch = BatchShape(2, 24)
    assert_same(tracer.trace(spec, batch, num_micro=2), tracer.trace(spec, batch, num_micro=2, whole=True))
    assert not failures


@pytest.mark.parametrize(("name", "adapter", "which"), list(_cases()))
def test_the_derived_trace_is_the_traced_one(tracers, name, adapter, which, monkeypatch):
    tracer, failures = tracers(name, adapter), note_failures(monkeypatch)
    spec = plain_spec(
        2,
        "bf16",
        gradient_checkpointing=as_text(which),
        adapter=adapter if isinstance(adapter, str) else adapter["kind"],
    )
    batch = BatchShape(2, 24, target_length=10 if TASKS.get(name) is SEQ2SEQ else None)
    derived = tracer.trace(spec, batch, num_micro=2)
    traced = tracer.trace(spec, batch, num_micro=2, whole=True)
    assert_same(derived, traced)
    assert not failures, "all of it was traced, and nothing derived"


def test_products_of_an_fp8_base(tracers):
    """Each linear module of the base has one in forward and one in backward, and half the weight of bf16."""
    batch, traces = BatchShape(2, 24), {}
    for value in ("lora", "lora-fp8"):
        traces[value] = tracers("llama", value).trace(plain_spec(2, "bf16", adapter=value), batch)
    width, inner, layers = SMALL["hidden_size"], SMALL["intermediate_size"], 8
    shapes = [(width, width), (width, width // 2), (width, width // 2), (width, width), *[(width, inner)] * 3]
    weights = layers * sum(rows * columns for rows, columns in shapes)
    flops = {
        value: Counter({dtype: sum(op.flops for op in trace.ops if op.dtype == dtype) for dtype in ("bf16", "fp8")})
        for value, trace in traces.items()
    }
    products = [op for op in traces["lora-fp8"].ops if op.dtype == "fp8" and op.flops]
    # backward needs no gradient of the input of the first block
    assert (7 * layers * 2) - 4 < len(products) <= 7 * layers * 2
    forward = sum(op.flops for op in products if op.stage == "forward")
    assert forward == 2 * 2 * 24 * weights
    assert flops["lora-fp8"]["bf16"] + flops["lora-fp8"]["fp8"] == flops["lora"]["bf16"]
    found = {value: predict(trace).parts["weights"] for value, trace in traces.items()}
    scales = 4 * layers * (width + width // 2 + width // 2 + width + inner + inner + width)
    saved = found["lora"] - found["lora-fp8"]
    assert weights - 2 * scales - 512 * 7 * layers <= saved <= weights


def test_what_lives_longer_than_its_neighbours_is_noticed(monkeypatch):
    """Each block keeps something until the second one after it is done: a copy of one block cannot show that."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    forward, kept = LlamaDecoderLayer.forward, []

    def keeping(self, hidden_states, *args, **kwargs):
        out = forward(self, hidden_states, *args, **kwargs)
        kept.append(hidden_states.detach() * 2)
        if len(kept) > 2:
            del kept[0]
        if self.self_attn.layer_idx == self.self_attn.config.num_hidden_layers - 1:
            kept.clear()
        return out

    monkeypatch.setattr(LlamaDecoderLayer, "forward", keeping)
    config = CONFIGS["llama"] | {"num_hidden_layers": 16}
    derived = trace_plain_step(config, "AutoModelForCausalLM", 8, 64)
    traced = trace_plain_step(config, "AutoModelForCausalLM", 8, 64, whole=True)
    assert sizes(derived) == sizes(traced)


@pytest.mark.slow
def test_blocks_that_differ_by_a_list_of_the_config():
    """Every fourth block of a SmolLM3 has no positions, which no shape shows."""
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    config = {"model_type": "smollm3", "num_hidden_layers": 24, "num_key_value_heads": 2, **SMALL, **tokens}
    derived, traced = (trace_plain_step(config, "AutoModelForCausalLM", 2, 24, whole=whole) for whole in (False, True))
    assert len(derived.events) == len(traced.events)
    assert ops(derived) == ops(traced)


@pytest.mark.parametrize("name", CONFIGS)
def test_and_not_because_nothing_was_left_out(tracers, name):
    model = tracers(name).skeleton()
    short = shorten(model)
    assert short.repeats
    assert len(short.kept) < sum(len(blocks) for _, blocks in stacks_of(model))
    assert len(short.kept) == sum(len(blocks) for _, blocks in stacks_of(short.model))


@pytest.mark.parametrize("optimizer", ["adamw8bit", pytest.param("paged-adamw8bit", marks=pytest.mark.slow), "sgd"])
def test_optimizers(tracers, optimizer):
    spec, batch = plain_spec(2, "bf16", optimizer=optimizer), BatchShape(2, 24, is_padded=True)
    assert_same(tracers("llama").trace(spec, batch), tracers("llama").trace(spec, batch, whole=True))


def test_what_adafactor_makes_for_one_parameter_after_the_other_does_not_change_the_peak(tracers):
    spec, batch = plain_spec(2, "bf16", optimizer="adafactor"), BatchShape(2, 24)
    derived, traced = (predict(tracers("llama").trace(spec, batch, whole=whole)) for whole in (False, True))
    assert derived.allocated == traced.allocated
    assert derived.parts == traced.parts


@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=pytest.mark.slow), "bf16-pure"])
def test_precisions(tracers, precision):
    spec, batch = plain_spec(2, precision, loss="chunked", kernels="liger"), BatchShape(2, 24)
    assert_same(tracers("llama").trace(spec, batch), tracers("llama").trace(spec, batch, whole=True))


def assert_same_but_for_the_order_in_lists(derived, traced):
    """The results of one call for a list of tensors are born together: those of a block lie together in the one."""
    assert Counter(sizes(derived)) == Counter(sizes(traced))
    assert len(derived.events) == len(traced.events)
    assert ops(derived) == ops(traced)
    assert predict(derived).allocated == predict(traced).allocated


def test_an_optimizer_that_works_on_lists(tracers):
    spec, batch = plain_spec(2, "bf16", optimizer="adagrad"), BatchShape(2, 24)
    derived, traced = (tracers("llama").trace(spec, batch, whole=whole) for whole in (False, True))
    assert_same_but_for_the_order_in_lists(derived, traced)


@pytest.mark.parametrize(
    ("name", "optimizer", "implementation"),
    [
        ("llama", "adamw", "fused"),
        pytest.param("llama", "adagrad", "foreach", marks=pytest.mark.slow),
        ("gpt2", "sgd", "foreach"),
        pytest.param("modernbert", "adamw", "foreach", marks=pytest.mark.slow),
        pytest.param("t5", "adam", "fused", marks=pytest.mark.slow),
    ],
)
def test_steps_of_plain_transformers(name, optimizer, implementation):
    heads = {"t5": "AutoModelForSeq2SeqLM", "modernbert": "AutoModelForSequenceClassification"}
    arguments = {
        "precision": "bf16",
        "mask": "padded",
        "recomputes": optimizer == "sgd",
        "optimizer": optimizer,
        "implementation": implementation,
        "target_length": 10 if name == "t5" else None,
    }
    derived, traced = (
        trace_plain_step(CONFIGS[name], heads.get(name, "AutoModelForCausalLM"), 2, 24, whole=whole, **arguments)
        for whole in (False, True)
    )
    if implementation == "fused":
        assert_same(derived, traced)
    assert_same_but_for_the_order_in_lists(derived, traced)


def test_where_blocks_are_named_one_by_one_all_are_traced():
    recipe = Recipe.model_validate(
        {
            "model": {"config": CONFIGS["llama"], "tokenizer": "train"},
            "data": {"train": "text.jsonl"},
            "train": {"freeze": {"model.layers.3.*": "always"}},
        }
    )
    tracer = StepTracer(recipe, CAUSAL, Gpu())
    trace = tracer.trace(plain_spec(2, "bf16", optimizer="adamw"), BatchShape(2, 24))
    assert len(trace.gradients) == len(list(tracer.skeleton().parameters())) - 9, "all but those of one block"


@pytest.mark.slow
@pytest.mark.parametrize("which", ["{every: 4}", "{all_but_every: 4}", "{every: 6}"])
@pytest.mark.parametrize(
    ("name", "adapter", "compiled"), [("llama", "none", "off"), ("llama", "lora", "graphs"), ("bert", "none", "blocks")]
)
def test_recomputed_blocks_are_derived_from_few(name, adapter, compiled, which, monkeypatch):
    """Blocks of one kind depend on their neighbours alone, however long the period of recomputed ones is."""
    failures, lengths = note_failures(monkeypatch), []
    real = model_trace.shorten
    monkeypatch.setattr(model_trace, "shorten", lambda *a, **k: lengths.append(found := real(*a, **k)) or found)
    recipe = Recipe.model_validate(
        {
            "model": {"config": CONFIGS[name] | {"num_hidden_layers": 19}, "tokenizer": "train"},
            "data": {"train": "text.jsonl"},
            "adapter": adapter,
        }
    )
    tracer = StepTracer(recipe, TASKS.get(name, CAUSAL), Gpu())
    spec = plain_spec(2, "bf16", gradient_checkpointing=which, adapter=adapter, compile=compiled)
    derived = tracer.trace(spec, BatchShape(2, 24), num_micro=2)
    assert_same(derived, tracer.trace(spec, BatchShape(2, 24), num_micro=2, whole=True))
    assert not failures
    assert len(lengths[0].kept) < 15


def test_blocks_whose_copies_begin_early_are_kept_for_a_period():
    spec = plain_spec(2, "bf16", gradient_checkpointing="{every: 4}")
    assert not reaches_far(spec)
    assert reaches_far(spec.having({"offload_activations": "all"}))
    assert len(find_repeat("baaa" * 8)[1]) > len(find_repeat("baaa" * 8, reaches_far=False)[1])


# ---------------------------------------------------------------------- which blocks are repeated


@pytest.mark.parametrize("num_blocks", range(5))
def test_few_blocks_are_all_traced(num_blocks):
    assert find_repeat("a" * num_blocks) is None


def test_the_ends_and_one_block_between_stand_for_all():
    repeat, kept = find_repeat("a" * 32)
    assert repeat == Repeat(first=2, period=1, num_more=27)
    assert kept == [0, 1, 2, 30, 31]


def test_of_what_alternates_a_pair_is_the_unit():
    repeat, kept = find_repeat("ab" * 8)
    assert repeat.period == 2
    assert kept == [0, 1, 2, 3, 14, 15]
    assert len(kept) + repeat.num_more * repeat.period == 16


def test_blocks_that_are_alone_of_their_kind_stay():
    kinds = "x" + "a" * 12 + "y"
    repeat, kept = find_repeat(kinds)
    assert {0, 13} <= set(kept)
    assert repeat.first == 3
    assert len(kept) + repeat.num_more * repeat.period == 14


def test_the_longest_stretch_is_the_one_that_is_shortened():
    repeat, kept = find_repeat("aaaaaa" + "b" * 20)
    assert repeat.first >= 7
    assert set(range(6)) <= set(kept)


def test_what_never_repeats_is_not_shortened():
    assert find_repeat(range(20)) is None


@pytest.mark.parametrize("kinds", ["aaab" * 6, "a" * 7, "abcabcabcabcabc", "a" * 10 + "b" * 11, "xaaaaaaaaay"])
def test_what_is_left_out_is_like_what_stands_for_it(kinds):
    found = find_repeat(kinds)
    assert found is not None
    repeat, kept = found
    for index in range(len(kinds)):
        if index not in kept:
            stands_for_it = repeat.first + (index - repeat.first) % repeat.period
            assert stands_for_it in kept
            assert kinds[stands_for_it] == kinds[index]
    assert len(kept) + repeat.num_more * repeat.period == len(kinds)


def test_without_a_repeat_a_trace_stays_as_it_is(tracers):
    trace = tracers("llama").trace(plain_spec(2, "fp32", optimizer="sgd"), BatchShape(1, 8), whole=True)
    assert extend(trace, {}) is trace
