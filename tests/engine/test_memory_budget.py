"""A loop of one's own under a budget of memory: what is chosen, what is said, and that nothing else changes."""

import logging
import random
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from tiny_models import same_weights
from trimtab import Engine
from trimtab.errors import DoesNotFit, RecipeError
from trimtab.hardware.memory import memory_in_use
from trimtab.optim.quantized import AdamW8bit
from trimtab.planner import own_loop
from trimtab.planner.decide import choose_row
from trimtab.planner.largest_batch import largest_batch
from trimtab.planner.memory import predict
from trimtab.planner.target import known_target, target_here
from trimtab.planner.trace.own_step import OwnStep
from trimtab.techniques.apply import change_optimizer, plain_spec
from trimtab.techniques.base import Accelerator, Case, as_text

MIB = 2**20
CPU = torch.device("cpu")
BERT = {"vocab_size": 300, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 256}


@pytest.fixture(autouse=True)
def _said_is_kept(caplog):
    caplog.set_level(logging.INFO, logger="trimtab")


@pytest.fixture
def alone(monkeypatch):
    """Python and its packages take nothing, so that budgets can be as small as the models here."""

    def target(device, budget):
        found = target_here(device, budget)
        return replace(found, outside_bytes=0)

    monkeypatch.setattr(own_loop, "target_here", target)
    monkeypatch.setattr(own_loop, "memory_in_use", lambda _: 0)


def bert(num_layers=4, **settings):
    torch.manual_seed(3)
    config = AutoConfig.for_model("bert", num_hidden_layers=num_layers, max_position_embeddings=64, **BERT, **settings)
    return AutoModelForSequenceClassification.from_config(config)


def rows(count=24, length=48, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return [
        {
            "input_ids": torch.randint(5, 300, (length,), generator=draw),
            "attention_mask": torch.ones(length, dtype=torch.long),
            "labels": torch.tensor(number % 2),
        }
        for number in range(count)
    ]


def parts(model=None, data=None, **loading):
    model = model or bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loading = {"batch_size": 8, "shuffle": True} | loading
    return model, optimizer, DataLoader(data or rows(), **loading), torch.optim.lr_scheduler.LinearLR(optimizer)


def prepared(budget, made=None, **settings):
    engine = Engine(device="cpu", memory_budget=budget, **settings)
    return engine, *engine.prepare(*(made or parts()))


def train(engine, model, optimizer, loader, scheduler, epochs=2):
    torch.manual_seed(5)  # the order of the rows, and dropout
    model.train()
    for _ in range(epochs):
        for batch in loader:
            with engine.accumulate(model):
                engine.backward(model(**batch).loss)
                engine.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return model


def predicted(recomputed="none", *, is_8bit=False, made=None, precision="fp32", num_micro=1):
    """What a step takes on this machine's CPU, nothing else counted."""
    model, optimizer, loader, _ = made or parts()
    target = replace(target_here(CPU, None), outside_bytes=0)
    step = OwnStep(model, optimizer, num_micro, target)
    name = type(optimizer).__name__ + ("8bit" if is_8bit else "")
    spec = plain_spec(8, precision, optimizer=name, gradient_checkpointing=as_text(recomputed))
    return target.as_here(predict(step.trace(spec, largest_batch(loader)))).allocated


def budget_for(*args, **kwargs):
    """Just enough for a step: a plan leaves 2% free."""
    return int(predicted(*args, **kwargs) / 0.97)


# ---------------------------------------------------------------------- choosing


def test_more_is_recomputed_as_memory_gets_short_and_the_weights_stay_the_same(alone, caplog):
    plain = train(engine := Engine(device="cpu"), *engine.prepare(*parts()))
    sizes = {word: budget_for(word if word != "every" else {"every": 2}) for word in ("none", "every", "all")}
    assert sizes["none"] > sizes["every"] > sizes["all"]
    for word, spelled in (("none", "none"), ("every", "{every: 2}"), ("all", "all")):
        caplog.clear()
        engine, *rest = prepared(sizes[word])
        assert engine._memory_planner.chosen.spec["gradient_checkpointing"] == spelled
        num_wrapped = sum("_trimtab_plain_block" in module.__dict__ for module in rest[0].modules())
        assert num_wrapped == {"none": 0, "every": 2, "all": 4}[word]
        assert same_weights(train(engine, *rest), plain), word
    assert "recompute all, predicted" in caplog.text
    assert "; nothing recomputed would need " in caplog.text


def test_a_budget_of_the_whole_process_is_planned_and_watched(caplog):
    """Nothing is stood in for here: what Python and its packages take is counted, too."""
    engine, *rest = prepared(memory_in_use(CPU) + 2**30)
    train(engine, *rest, epochs=1)
    assert engine._memory_planner.chosen.spec["gradient_checkpointing"] == "none"
    assert memory_in_use(CPU) / 2 < engine._memory_planner.chosen.total_bytes
    assert "memory_budget: the measured peak so far is" in caplog.text
    assert "more than memory.budget" not in caplog.text
    assert "predictions for a CPU are estimates: they count tensors" in caplog.text


@pytest.mark.slow
def test_on_a_cpu_passing_the_budget_is_said_and_nothing_is_refused(caplog):
    engine, *rest = prepared("1MiB")
    train(engine, *rest, epochs=1)
    assert "over the budget of 1.0 MiB (cpu)" in caplog.text
    assert "the smallest plan is used" in caplog.text
    assert engine._memory_planner.chosen.spec["gradient_checkpointing"] == "all"
    assert caplog.text.count("which cannot be enforced on this device") == 1


def test_accumulation_keeps_gradients_and_that_is_counted():
    assert predicted(num_micro=2) > predicted(num_micro=1)


def test_the_trace_is_of_the_user_s_own_model_and_optimizer():
    """What is frozen has no gradients and no state; another optimizer has other state."""
    whole, frozen, sgd = bert(), bert(), bert()
    for parameter in frozen.bert.parameters():
        parameter.requires_grad_(False)
    _, optimizer, loader, scheduler = parts(sgd)
    momentum = torch.optim.SGD(sgd.parameters(), lr=0.1)
    weights = sum(parameter.nbytes for parameter in whole.parameters())
    assert predicted(made=parts(frozen)) < predicted(made=parts(whole)) - 3 * weights
    difference = predicted(made=parts(whole)) - predicted(made=(sgd, momentum, loader, scheduler))
    assert difference == pytest.approx(2 * weights, rel=0.1)


def test_precision_left_to_the_engine_is_what_the_device_does():
    assert Engine(device="cpu", mixed_precision="auto").mixed_precision == "no"
    halves = [predicted(precision=name) for name in ("bf16", "fp32")]
    assert halves[0] < halves[1]


@pytest.mark.slow
def test_gradient_checkpointing_of_the_user_s_own_stays(alone, caplog):
    model = bert()
    model.gradient_checkpointing_enable()
    engine, *_ = prepared("1MiB", parts(model))
    assert engine._memory_planner.chosen.spec["gradient_checkpointing"] == "none"
    assert model.is_gradient_checkpointing
    assert "the model's own gradient checkpointing is kept" in caplog.text


@pytest.mark.slow
def test_decoders_and_their_caches(alone):
    torch.manual_seed(3)
    settings = BERT | {"num_hidden_layers": 4, "num_key_value_heads": 1, "max_position_embeddings": 64}
    config = AutoConfig.for_model("llama", **settings)

    def made():
        torch.manual_seed(3)
        data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows()]
        return parts(AutoModelForCausalLM.from_config(config), data)

    plain = train(engine := Engine(device="cpu"), *engine.prepare(*made()))
    engine, *rest = prepared(budget_for("all", made=made()), made())
    assert engine._memory_planner.chosen.spec["gradient_checkpointing"] == "all"
    assert same_weights(train(engine, *rest), plain)


# ---------------------------------------------------------------------- 8 bits


@pytest.mark.slow
def test_state_of_8_bits_is_a_choice_only_where_it_is_allowed(alone, caplog):
    budget = budget_for("all", is_8bit=True)
    assert budget < budget_for("all")
    engine, *_ = prepared(budget)
    assert engine._memory_planner.chosen.spec["optimizer"] == "AdamW"
    assert 'memory_allow=["8bit"]' in caplog.text
    made = parts()
    engine, model, optimizer, loader, scheduler = prepared(budget, made, memory_allow=["8bit"])
    assert engine._memory_planner.chosen.spec["optimizer"] == "AdamW8bit"
    assert type(optimizer.optimizer) is AdamW8bit
    assert "AdamW8bit" in caplog.text
    before = [parameter.clone() for parameter in model.parameters()]
    train(engine, model, optimizer, loader, scheduler, epochs=1)
    assert not all(map(torch.equal, before, model.parameters()))
    state = optimizer.state[model.bert.embeddings.word_embeddings.weight]
    assert state["state1"].dtype is torch.uint8
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] != made[1].defaults["lr"] / 3


@pytest.mark.slow
def test_what_keeps_an_optimizer_from_8_bits_is_said(alone, caplog):
    model, _, loader, _ = parts()
    amsgrad = torch.optim.AdamW(model.parameters(), amsgrad=True)
    Engine(device="cpu", memory_budget="1GiB", memory_allow=["8bit"]).prepare(model, amsgrad, loader)
    assert "8-bit optimizer state is not possible: the 8-bit version of AdamW does not support amsgrad" in caplog.text
    made = parts()
    train(engine := Engine(device="cpu"), *engine.prepare(*made), epochs=1)
    engine, *_ = prepared(budget_for("all", is_8bit=True), made, memory_allow=["8bit"])
    assert "this AdamW already has state" in caplog.text
    assert engine._memory_planner.chosen.spec["optimizer"] == "AdamW"


# ---------------------------------------------------------------------- nothing fits


def test_nothing_fits_on_a_gpu(monkeypatch):
    """By how much, and what else was tried; nothing is changed."""
    monkeypatch.setattr(own_loop, "target_here", lambda *_: known_target("a100", "860MiB"))
    wide = bert(num_layers=2)
    made = parts(wide, rows(256), batch_size=256)
    with pytest.raises(DoesNotFit, match=r"over the budget of 860\.0 MiB \(a100\)") as caught:
        prepared("860MiB", made)
    words = str(caught.value)
    assert words.startswith("does not fit: needs ")
    assert 'still too large with:\n    memory_allow=["8bit"]: ' in words
    assert 'mixed_precision="bf16": ' in words
    assert "(256 rows of 48 tokens: the longest of all 256)" in words
    assert caught.value.exit_code == 3
    assert not any("_trimtab_plain_block" in module.__dict__ for module in wide.modules()), "nothing was changed"


@pytest.mark.slow
def test_what_is_proposed_does_fit(monkeypatch):
    monkeypatch.setattr(own_loop, "target_here", lambda *_: known_target("a100", "1000MiB"))
    with pytest.raises(DoesNotFit) as caught:
        prepared("1000MiB", parts(bert(2), rows(512), batch_size=512))
    fitting = str(caught.value).partition("would fit with:")[2]
    assert "DataLoader(batch_size=" in fitting
    size = int(fitting.partition("batch_size=")[2].partition(")")[0])
    assert 1 <= size < 512
    engine, *_ = prepared("1000MiB", parts(bert(2), rows(512), batch_size=size))
    assert engine._memory_planner.chosen.spec["gradient_checkpointing"] == "all"


def test_the_pool_of_cuda_graphs_is_predicted(monkeypatch, caplog):
    """Gradients stay allocated, and nothing else can use the pool. Graphs are not captured here, only predicted."""
    monkeypatch.setattr(own_loop, "target_here", lambda *_: known_target("a100", "20GiB"))
    monkeypatch.setattr("trimtab.model.captured_micro_batch.CudaRecorder.supports", lambda *_: True)
    totals = []
    for graphs in (False, True):
        assert "CUDA graphs are predicted for the largest batch" not in caplog.text
        engine, *_ = prepared("20GiB", parts(bert(2), rows(64), batch_size=64), cuda_graphs=graphs)
        totals.append(engine._memory_planner.chosen.total_bytes)
    assert "CUDA graphs are predicted for the largest batch" in caplog.text
    gradients = sum(parameter.nbytes for parameter in bert(2).parameters())
    assert totals[1] > totals[0] + gradients / 2


def test_more_than_there_is_and_unknown_words_are_refused():
    with pytest.raises(RecipeError, match="memory_budget is 4096.0 TiB, but cpu has"):
        Engine(device="cpu", memory_budget="4096TiB")
    with pytest.raises(RecipeError, match="memory_allow"):
        Engine(device="cpu", memory_budget="1GiB", memory_allow=["4bit"])
    with pytest.raises(RecipeError, match="no effect without a budget"):
        Engine(device="cpu", memory_allow=["8bit"])
    with pytest.raises(RecipeError, match="'8 G'"):
        Engine(device="cpu", memory_budget="8 G")


# ---------------------------------------------------------------------- what cannot be predicted


class Untraceable(torch.nn.Module):
    """Asks for the values of its weights."""

    def __init__(self):
        super().__init__()
        self.inner, self.config = bert(2), bert(2).config

    def get_output_embeddings(self):
        return None

    def forward(self, input_ids, attention_mask, labels):
        assert next(self.inner.parameters())[0].tolist()
        return self.inner(input_ids, attention_mask, labels=labels)


def test_a_model_that_cannot_be_traced_trains_all_the_same(caplog):
    plain = train(engine := Engine(device="cpu"), *engine.prepare(*parts(Untraceable())))
    engine, *rest = prepared("2GiB", parts(Untraceable()))
    lines = [line for line in caplog.messages if line.startswith("memory_budget")]
    assert len(lines) == 1
    assert "the step cannot be traced (" in lines[0]
    assert engine._memory_planner.chosen is None
    assert same_weights(train(engine, *rest), plain)


class Stream(IterableDataset):
    def __iter__(self):
        raise AssertionError("a stream must not be read before the loop does")


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: parts()[:1], "a model without optimizer and DataLoader"),
        (lambda: parts()[:2], "a model without DataLoader"),
        (lambda: parts(data=Stream(), shuffle=False), "reads a stream"),
        (lambda: parts(data=[(row["input_ids"], row["labels"]) for row in rows()]), "batches of type list"),
        (lambda: parts(data=rows(), batch_sampler=[[0], [1]], batch_size=1, shuffle=None), "list has no batch_size"),
        (lambda: (*parts(), torch.optim.SGD(bert().parameters())), "2 optimizers"),
        (lambda: (bert(), *parts()[1:]), "trains none of the models"),
        (lambda: (model := torch.nn.Linear(2, 2), *parts(model)[1:]), "Linear is not a transformers model"),
    ],
)
def test_what_is_not_known_is_said_in_one_line(caplog, made, words):
    Engine(device="cpu", memory_budget="2GiB").prepare(*made())
    lines = [line for line in caplog.messages if line.startswith("memory_budget")]
    assert len(lines) == 1
    assert words in lines[0]
    assert "no prediction, nothing is changed" in lines[0]


def test_a_single_model_and_later_parts_are_told_once(caplog):
    engine = Engine(device="cpu", memory_budget="2GiB")
    engine.prepare_model(bert())
    engine.prepare(DataLoader(rows()))
    assert len([line for line in caplog.messages if line.startswith("memory_budget")]) == 1


def test_a_loss_that_is_not_the_model_s_is_said(alone, caplog):
    data = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in rows()]
    engine, *_ = prepared("1GiB", parts(data=data))
    assert (
        "the loss, which the model does not compute from these batches, and evaluation are not predicted" in caplog.text
    )
    assert engine._memory_planner.chosen.spec["gradient_checkpointing"] == "none"


# ---------------------------------------------------------------------- the loader stays as it was


class Noisy:
    """A collator that draws from every generator there is, one of its own included."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(7)
        self.num_calls = 0

    def __call__(self, batch):
        self.num_calls += 1
        noise = torch.rand(1) + random.random() + torch.rand(1, generator=self.generator)  # noqa: S311
        stacked = {name: torch.stack([row[name] for row in batch]) for name in batch[0]}
        return stacked | {"noise": noise}


def test_looking_at_the_loader_moves_no_generator(alone):
    def batches(budget):
        random.seed(0)
        torch.manual_seed(0)
        order = torch.Generator().manual_seed(2)
        made = parts(collate_fn=Noisy(), generator=order)
        torch.manual_seed(1)
        _, _, _, loader, _ = prepared(budget, made)
        return [(batch["noise"].item(), batch["input_ids"].sum().item()) for _ in range(2) for batch in loader]

    assert batches("1GiB") == batches(None)


def test_the_longest_rows_that_are_looked_at_decide():
    def padded(batch):
        longest = max(len(row["input_ids"]) for row in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(batch):
            ids[number, : len(row["input_ids"])] = row["input_ids"]
            mask[number, : len(row["input_ids"])] = 1
        return {"input_ids": ids, "attention_mask": mask}

    data = [{"input_ids": torch.ones(5 + number % 17, dtype=torch.long)} for number in range(40)]
    found = largest_batch(DataLoader(data, batch_size=4, collate_fn=padded))
    assert (found.rows, found.length, found.is_padded) == (4, 21, True)
    assert str(found) == "4 rows of 21 tokens: the longest of all 40"
    assert found.inputs["input_ids"].is_meta
    half = largest_batch(DataLoader(data, batch_size=4, collate_fn=padded), num_parts=2)
    assert half.rows == 2
    many = largest_batch(DataLoader(data * 100, batch_size=4, collate_fn=padded))
    assert many.origin == "the longest of a sample of 512 of 4,000"
    smaller = found.resized(rows=2, length=8)
    assert smaller.inputs["attention_mask"].shape == (2, 8)


def test_numbers_of_processes_and_labels_of_a_decoder_are_seen():
    data = [{"input_ids": [1] * 9, "labels": [1] * 2} for _ in range(6)] + [{"input_ids": [1] * 3, "labels": [1] * 30}]

    def padded(batch):
        shape = {name: max(len(row[name]) for row in batch) for name in batch[0]}
        return {name: torch.zeros(len(batch), longest, dtype=torch.long) for name, longest in shape.items()}

    found = largest_batch(DataLoader(data, batch_size=3, collate_fn=padded))
    assert found.inputs["input_ids"].shape == (3, 9)
    assert found.inputs["labels"].shape == (3, 30), "the row with the longest labels is in it"


def test_an_engine_takes_a_memory_planner():
    class Recorded:
        parts: tuple = ()

        def fit_to_budget(self, engine, parts, splits_batches):
            self.parts = parts
            return parts

    planner, model = Recorded(), torch.nn.Linear(2, 2)
    Engine(device="cpu", memory_planner=planner).prepare(model)
    assert planner.parts == (model,)
    with pytest.raises(RecipeError, match="memory_planner was passed together with memory_budget"):
        Engine(device="cpu", memory_planner=planner, memory_budget="1GiB")


@pytest.mark.slow
def test_what_does_not_fit_on_a_gpu_is_refused_with_what_would():
    """Adapters are no suggestion here: the planner cannot add them to a model of the user's."""
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters())
    target = known_target("t4", "100MiB")
    step = OwnStep(model, optimizer, 1, target)
    case = Case(model, Accelerator("cuda", (7, 5)), "fp32", optimizer=optimizer)
    planner = own_loop._LoopPlanner(step, case, target, largest_batch(DataLoader(rows(), batch_size=8)), 1, 0)
    with pytest.raises(DoesNotFit, match="mixed_precision") as refused:
        choose_row(planner, always_explains=True)
    assert "adapter" not in str(refused.value)


def test_an_optimizer_that_has_8_bits_already_stays():
    optimizer = AdamW8bit(bert().parameters(), lr=1e-3)
    spec = plain_spec(1, "fp32", optimizer="AdamW8bit")
    assert change_optimizer(optimizer, spec, optimizer.param_groups) is optimizer
