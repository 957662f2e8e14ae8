"""Loops with Accelerate's verbs, as its users write them: only the import line says where `Accelerator` comes from."""

import itertools
import json
import math
import weakref

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

from tiny_models import config_of, tokenizer
from trimtab import DistributedType, accelerate
from trimtab import Engine as Accelerator
from trimtab.errors import PrepareError, RecipeError

WORDS = ["red", "green", "blue", "warm", "cold", "old", "new"]


def build_classifier():
    return BertForSequenceClassification(BertConfig(**config_of("bert"), vocab_size=300))


def build_text_loader(num_rows=10, batch_size=4, shuffle=False):
    """Batches as `tokenizer.pad` gives them; the label says whether the sentence begins with a colour."""
    tok = tokenizer()
    sentences = [" ".join(WORDS[(3 * row + i) % 7] for i in range(2 + row % 4)) for row in range(num_rows)]
    labels = [int(sentence.split()[0] in WORDS[:3]) for sentence in sentences]
    rows = [{**tok(text), "labels": label} for text, label in zip(sentences, labels, strict=True)]
    return DataLoader(rows, batch_size, shuffle, collate_fn=lambda examples: tok.pad(examples, return_tensors="pt"))


class Slope(torch.nn.Module):
    """One weight, so that every step can be computed by hand: the loss of a batch is its mean times the weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, rows):
        return (rows * self.weight).mean()


def slope_parts(num_rows, batch_size=1, lr=1.0, shuffle=False):
    model = Slope()
    loader = DataLoader(TensorDataset(torch.arange(1.0, num_rows + 1)), batch_size, shuffle)
    return model, torch.optim.SGD(model.parameters(), lr=lr), loader


# ---------------------------------------------------------------------- construction


def test_cpu_and_no_precision_as_argparse_gives_them():
    assert isinstance(Accelerator().device, torch.device)
    accelerator = Accelerator(cpu=True, mixed_precision=None, log_with=None, project_dir=None)
    assert accelerator.device == torch.device("cpu")
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("no", 1)
    assert accelerator.scaler.is_scaling is False
    model = accelerator.prepare(Slope())
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    assert model(torch.ones(3)).dtype is torch.float32


def test_one_process_is_first_last_and_alone():
    accelerator = Accelerator(cpu=True)
    assert accelerator.distributed_type == DistributedType.NO == "NO"
    assert accelerator.distributed_type not in (DistributedType.XLA, DistributedType.TPU, DistributedType.MULTI_GPU)
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (1, 0, 0)
    assert accelerator.is_main_process
    assert accelerator.is_local_main_process
    assert accelerator.is_last_process
    assert not accelerator.use_distributed


# ---------------------------------------------------------------------- prepare and train


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_prepare_takes_its_parts_in_any_order(order):
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = slope_parts(num_rows=4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    parts = [model, optimizer, loader, schedule]
    prepared = accelerator.prepare(*(parts[index] for index in order))
    model, optimizer, loader, schedule = (prepared[order.index(index)] for index in range(4))
    for (rows,) in loader:
        accelerator.backward(model(rows))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert model.weight.item() == -(1 * 1 + 2 / 2 + 3 / 4 + 4 / 8)
    assert schedule.get_last_lr() == [1 / 16]


@pytest.mark.parametrize("precision", ["bf16", *(pytest.param(p, marks=pytest.mark.slow) for p in ("no", "fp16"))])
def test_batch_encodings_arrive_whole_and_outputs_are_fp32_in_every_precision(precision):
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    torch.manual_seed(3)
    model = build_classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, loader = accelerator.prepare(model.to(accelerator.device), optimizer, build_text_loader())
    losses, num_rows = [], 0
    for epoch in range(20):
        for batch in loader:
            assert type(batch) is BatchEncoding
            batch.to(accelerator.device)
            outputs = model(**batch)
            assert {outputs.logits.dtype, outputs.loss.dtype} == {torch.float32}
            accelerator.backward(outputs.loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(outputs.loss.item())
            num_rows += len(batch["labels"]) if epoch == 0 else 0
    assert num_rows == 10
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])


def test_accumulate_steps_at_the_end_of_each_window_and_of_the_epoch():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, optimizer, loader = slope_parts(num_rows=7)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 10.0**-step)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    weights, ends, norms = [], [], []
    for (rows,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(rows))
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 100.0).item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        ends.append(accelerator.sync_gradients)
        weights.append(model.weight.item())
    assert ends == [False, False, True, False, False, True, True]
    assert norms == pytest.approx([2, 5, 7])  # the means of 1..3, of 4..6, and of 7 alone
    assert weights == pytest.approx([0, 0, -2, -2, -2, -2.5, -2.57])
    assert schedule.get_last_lr() == pytest.approx([1e-3])


def test_the_length_of_a_window_can_be_changed_between_epochs():
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*slope_parts(num_rows=4))
    ends = {}
    for length in (1, 4, 2):
        accelerator.gradient_accumulation_steps = length
        ends[length] = []
        for (rows,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(rows))
                optimizer.step()
                optimizer.zero_grad()
            ends[length].append(accelerator.sync_gradients)
    assert accelerator.gradient_accumulation_steps == 2
    assert ends == {1: [True] * 4, 4: [False, False, False, True], 2: [False, True, False, True]}
    assert model.weight.item() == -(1 + 2 + 3 + 4) - 2.5 - (1.5 + 3.5)


def test_a_loop_that_fetches_its_window_first_and_weighs_by_tokens():
    """As for language models: all batches of a window are fetched, each loss is a sum over the window's token count,
    and is multiplied by the window's length because `backward` divides by it.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, optimizer, loader = slope_parts(num_rows=10, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    num_windows = math.ceil(len(loader) / 3)
    batches, norms = iter(loader), []
    for window in range(num_windows):
        samples = [next(batches) for _ in range(3 if window < num_windows - 1 else len(loader) % 3 or 3)]
        num_items = accelerator.gather(sum(rows.numel() for (rows,) in samples))
        for (rows,) in samples:
            loss = (rows * model.weight).sum() / num_items
            accelerator.backward(loss * 3 * accelerator.num_processes)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 100.0).item())
        optimizer.step()
        optimizer.zero_grad()
    assert norms == pytest.approx([3.5, 8.5])  # the means of 1..6 and of 7..10
    assert model.weight.item() == pytest.approx(-12)


def test_optimizers_with_modes_are_told():
    class TwoModes(torch.optim.SGD):
        mode = "none"

        def train(self):
            self.mode = "train"

        def eval(self):
            self.mode = "eval"

    accelerator = Accelerator(cpu=True)
    model = Slope()
    own = TwoModes(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, own)
    optimizer.train()
    assert own.mode == "train"
    optimizer.eval()
    assert own.mode == "eval"


# ---------------------------------------------------------------------- evaluation


def test_gather_for_metrics_gives_every_row_once():
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(build_classifier().eval(), build_text_loader(num_rows=10, batch_size=4))
    predictions, references = [], []
    for batch in loader:
        with torch.no_grad():
            logits = model(**batch).logits
        predicted, expected = accelerator.gather_for_metrics((logits.argmax(dim=-1), batch["labels"]))
        predictions.append(predicted)
        references.append(expected)
    assert [len(part) for part in references] == [4, 4, 2]
    assert torch.cat(predictions).shape == (10,)
    assert torch.cat(references).tolist() == [row["labels"] for row in loader.dataset]


def test_gathering_keeps_the_kind_of_what_is_given():
    accelerator = Accelerator(cpu=True)
    rows = torch.arange(3)
    assert accelerator.gather(rows) is rows
    gathered = accelerator.gather_for_metrics({"rows": rows, "pair": [rows, rows + 1]})
    assert list(gathered) == ["rows", "pair"]
    assert torch.equal(gathered["pair"][1], torch.tensor([1, 2, 3]))
    assert accelerator.gather_for_metrics(["a", "b"]) == ["a", "b"]
    assert accelerator.gather_for_metrics({"name": "a"}, use_gather_object=True) == [{"name": "a"}]
    assert accelerator.reduce(rows, "mean", scale=2.0).tolist() == [0, 2, 4]
    assert accelerator.pad_across_processes(rows, dim=0).tolist() == [0, 1, 2]


# ---------------------------------------------------------------------- processes


def test_contexts_for_who_goes_first_run_their_body_once():
    accelerator = Accelerator(cpu=True)
    visits = []
    with accelerator.main_process_first():
        visits.append("main")
    with accelerator.local_main_process_first():
        visits.append("local")
    accelerator.wait_for_everyone()
    assert visits == ["main", "local"]


@pytest.mark.parametrize("inputs", [["a", "b", "c"], ("a", "b"), {"text": ["a", "b"], "id": [1, 2]}, []])
@pytest.mark.parametrize("apply_padding", [False, True])
def test_one_process_gets_all_of_what_is_split(inputs, apply_padding):
    accelerator = Accelerator(cpu=True)
    with accelerator.split_between_processes(inputs, apply_padding=apply_padding) as share:
        assert share == inputs
        assert type(share) is type(inputs)
    with accelerator.split_between_processes(torch.arange(3)) as share:
        assert share.tolist() == [0, 1, 2]


def test_functions_for_the_main_process_keep_their_name_arguments_and_result():
    accelerator = Accelerator(cpu=True)
    calls = []

    @accelerator.on_main_process
    def save(name, *, suffix):
        """Saves."""
        calls.append(name)
        return name + suffix

    assert (save.__name__, save.__doc__) == ("save", "Saves.")
    assert save("model", suffix=".bin") == "model.bin"
    assert calls == ["model"]


def test_print_prints_once(capsys):
    accelerator = Accelerator(cpu=True)
    accelerator.print("epoch 0:", {"accuracy": 0.5}, end="!\n")
    assert capsys.readouterr().out == "epoch 0: {'accuracy': 0.5}!\n"


def test_a_trigger_stops_the_loop_and_is_lowered_by_the_look():
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*slope_parts(num_rows=20))
    num_steps = []
    for _ in range(2):
        num_steps.append(0)
        for (rows,) in loader:
            accelerator.backward(model(rows))
            optimizer.step()
            optimizer.zero_grad()
            num_steps[-1] += 1
            if rows.item() >= 5:
                accelerator.set_trigger()
            if accelerator.check_trigger():
                break
    assert num_steps == [5, 5]  # the second epoch begins anew: the break left nothing behind
    assert accelerator.check_trigger() is False


# ---------------------------------------------------------------------- saving and resuming


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_an_unwrapped_model_saves_itself_as_hugging_face_does(tmp_path, precision):
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = build_classifier().eval()
    batch = next(iter(build_text_loader()))
    with torch.no_grad():
        expected = model(**batch).logits
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    assert type(unwrapped) is BertForSequenceClassification
    unwrapped.save_pretrained(
        tmp_path, is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    again = BertForSequenceClassification.from_pretrained(tmp_path)
    assert {parameter.dtype for parameter in again.parameters()} == {torch.float32}
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, expected)


def hide_words(batch):
    is_hidden = torch.rand(batch["input_ids"].shape) < 0.3
    return {**batch, "input_ids": batch["input_ids"].masked_fill(is_hidden, 0)}


def train_classifier(folder, resume_from=None, save_at=None, num_epochs=3):
    """A loop that counts its batches itself, saves a folder for each of `save_at`, and resumes by a folder's name."""
    accelerator = Accelerator(cpu=True, seed=9)
    model = build_classifier().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=12)
    loader = build_text_loader(num_rows=16, batch_size=4, shuffle=True)
    pad = loader.collate_fn
    loader.collate_fn = lambda rows: hide_words(pad(rows))  # draws random numbers between those of dropout
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    first_epoch, num_to_skip, overall_step, seen = 0, 0, 0, []
    if resume_from is not None:
        accelerator.load_state(folder / f"step_{resume_from}")
        first_epoch, num_to_skip = divmod(resume_from, len(loader))
        overall_step = resume_from
    for epoch in range(first_epoch, num_epochs):
        model.train()
        active = loader
        if resume_from is not None and epoch == first_epoch:
            active = accelerator.skip_first_batches(loader, num_to_skip)
        for batch in active:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            overall_step += 1
            seen.append((epoch, batch["input_ids"].tolist()))
            if overall_step in (save_at or ()):
                accelerator.save_state(folder / f"step_{overall_step}")
    return seen, {name: value.clone() for name, value in model.state_dict().items()}, schedule.get_last_lr()


@pytest.mark.parametrize("resume_from", [1, 3, 4, 6, 11])  # 4: after the last batch of an epoch
def test_a_resumed_loop_sees_the_remaining_batches_and_ends_with_the_same_bits(tmp_path, resume_from):
    seen, weights, rates = train_classifier(tmp_path, save_at={resume_from})
    rest, resumed, resumed_rates = train_classifier(tmp_path, resume_from)
    assert len(seen) == 12
    assert rest == seen[resume_from:]
    assert resumed_rates == rates
    assert all(torch.equal(weights[name], value) for name, value in resumed.items())


@pytest.mark.parametrize(
    ("position", "num_skipped", "words"), [(2, 2, "next 2 batches"), (3, 3, "rest of the epoch"), (2, 1, None)]
)
def test_skipping_by_hand_after_a_loaded_state_is_reported(tmp_path, caplog, position, num_skipped, words):
    """As in `if step < resume_step: continue`. A loop that reads its window first skips fewer."""
    caplog.set_level("INFO", "trimtab")
    for resumes in (False, True):
        accelerator = Accelerator(cpu=True)
        model, optimizer, loader = accelerator.prepare(*slope_parts(num_rows=6))
        if resumes:
            accelerator.load_state(tmp_path / "state")
        for _ in range(2):
            for step, batch in enumerate(loader):
                if resumes and step < num_skipped:
                    continue
                accelerator.backward(model(*batch))
                optimizer.step()
                if not resumes and step == position - 1:
                    accelerator.save_state(tmp_path / "state")
    reports = [record.message for record in caplog.records if "load_state put the loader" in record.message]
    assert len(reports) == (words is not None)
    assert words is None or words in reports[0]


def test_skip_first_batches_of_a_loader_that_was_never_prepared():
    accelerator = Accelerator(cpu=True)
    _, _, loader = slope_parts(num_rows=6, batch_size=2)
    assert [rows.tolist() for (rows,) in accelerator.skip_first_batches(loader, 2)] == [[5.0, 6.0]]
    prepared = accelerator.prepare(loader)
    assert [rows.tolist() for (rows,) in accelerator.skip_first_batches(prepared, 1)] == [[3.0, 4.0], [5.0, 6.0]]
    assert len(list(prepared)) == 3  # only the next iteration is shortened


class Progress:
    """An object of the user's own, to be saved with the rest."""

    def __init__(self):
        self.best, self.history = None, []

    def state_dict(self):
        return {"best": self.best, "history": self.history}

    def load_state_dict(self, state):
        self.best, self.history = state["best"], state["history"]


def test_registered_objects_are_saved_and_come_back(tmp_path):
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = slope_parts(num_rows=1)
    model, optimizer = accelerator.prepare(model, optimizer)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    progress.best, progress.history = 0.75, [0.5, 0.75]
    folder = accelerator.save_state(tmp_path / "state")
    assert folder == str(tmp_path / "state")
    progress.best, progress.history = None, [1.0]
    with torch.no_grad():
        model.weight.fill_(3.0)
    accelerator.load_state(folder)
    assert (progress.best, progress.history) == (0.75, [0.5, 0.75])
    assert model.weight.item() == 0.0
    with pytest.raises(PrepareError, match="int, dict cannot be saved"):
        accelerator.register_for_checkpointing(progress, 3, {})


# ---------------------------------------------------------------------- tracking


def read_lines(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    times = [line.pop("time") for line in lines]
    assert times == sorted(times)
    return lines


@pytest.mark.parametrize("log_with", ["journal", "all", ["journal"]])
def test_what_is_logged_can_be_read_back(tmp_path, log_with):
    accelerator = Accelerator(cpu=True, log_with=log_with, project_dir=str(tmp_path / "logs"))
    accelerator.init_trackers("colours", config={"lr": 2e-5, "num_epochs": 3})
    accelerator.log({"accuracy": 0.5, "train_loss": torch.tensor(1.25), "note": "first"}, step=0)
    journal = tmp_path / "logs" / "colours" / "metrics.jsonl"
    assert len(read_lines(journal)) == 2  # readable while the run goes on
    accelerator.log({"accuracy": 0.75}, step=1)
    accelerator.log({"done": True})
    accelerator.end_training()
    assert read_lines(journal) == [
        {"config": {"lr": 2e-5, "num_epochs": 3}},
        {"step": 0, "accuracy": 0.5, "train_loss": 1.25, "note": "first"},
        {"step": 1, "accuracy": 0.75},
        {"step": None, "done": True},
    ]
    assert accelerator.get_tracker("journal").name == "journal"
    with pytest.raises(RecipeError, match="before init_trackers"):
        accelerator.log({"late": 1})


def test_tensorboard_gets_what_is_logged(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = accelerate.ProjectConfiguration(tmp_path, logging_dir=tmp_path / "logs")
    accelerator = accelerate.Accelerator(cpu=True, log_with="tensorboard", project_config=config)
    accelerator.init_trackers(
        "colours", {"lr": 0.1, "names": ["a"], "nothing": None}, {"tensorboard": {"flush_secs": 9}}
    )
    accelerator.log({"loss": 0.5, "accuracy": torch.tensor(0.25), "note": "fine", "both": {"a": 1, "b": 2}}, step=3)
    accelerator.get_tracker("tensorboard", unwrap=True).add_scalar("mine", 7, 1)
    assert accelerator.trackers[0].writer is accelerator.get_tracker("tensorboard", unwrap=True)
    accelerator.end_training()
    found = events.EventAccumulator(str(tmp_path / "logs" / "colours")).Reload()
    points = {name: [(point.step, point.value) for point in found.Scalars(name)] for name in found.Tags()["scalars"]}
    assert points == {"loss": [(3, 0.5)], "accuracy": [(3, 0.25)], "mine": [(1, 7.0)]}
    assert found.Tags()["tensors"] == ["note/text_summary"]


def test_without_trackers_logging_does_nothing_and_ending_is_allowed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator(cpu=True)
    accelerator.init_trackers("colours", {"lr": 1.0})
    accelerator.log({"loss": 1.0}, step=0)
    accelerator.end_training()
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_of_ones_own_is_called_beside_the_journal(tmp_path):
    class Memory:
        name = "memory"

        def __init__(self):
            self.calls = []

        def start(self, project_name, config):
            self.calls.append(("start", project_name, config))

        def log(self, values, step=None):
            self.calls.append(("log", values, step))

        def finish(self):
            self.calls.append(("finish",))

    memory = Memory()
    accelerator = Accelerator(cpu=True, log_with=["journal", memory], project_dir=tmp_path)
    accelerator.init_trackers("colours", {"lr": 1.0})
    accelerator.log({"loss": 2.0}, step=7)
    accelerator.end_training()
    assert memory.calls == [("start", "colours", {"lr": 1.0}), ("log", {"loss": 2.0}, 7), ("finish",)]
    assert read_lines(tmp_path / "colours" / "metrics.jsonl")[1] == {"step": 7, "loss": 2.0}
    assert accelerator.get_tracker("memory") is memory
    with pytest.raises(RecipeError, match="no tracker 'wandb'"):
        accelerator.get_tracker("wandb")


# ---------------------------------------------------------------------- beginning again


def test_memory_that_is_freed_is_freed_and_the_next_fold_begins_clean(tmp_path):
    """Cross-validation: one accelerator, a new model for each fold."""
    accelerator = Accelerator(cpu=True)
    finals, old = [], []
    for _ in range(3):
        model, optimizer, loader = accelerator.prepare(*slope_parts(num_rows=3))
        for (rows,) in loader:
            accelerator.backward(model(rows))
            optimizer.step()
            optimizer.zero_grad()
        finals.append(model.weight.item())
        old.append(weakref.ref(model))
        model, optimizer = accelerator.free_memory(model, optimizer)
        assert (model, optimizer) == (None, None)
    assert finals == [-6.0, -6.0, -6.0]
    assert [reference() for reference in old] == [None, None, None]
    with pytest.raises(PrepareError, match="before prepare"):
        accelerator.backward(torch.ones((), requires_grad=True))
    model, optimizer, loader = accelerator.prepare(*slope_parts(num_rows=3))
    folder = accelerator.save_state(tmp_path / "state")  # of the last fold alone
    accelerator.load_state(folder)


def train_until_it_fits(accelerator, batch_sizes, largest_that_fits):
    """Out of memory in the first batch, freed, smaller batches with more accumulation, as batch-size finders do."""
    for batch_size in batch_sizes:
        accelerator.gradient_accumulation_steps = max(batch_sizes) // batch_size
        accelerator.free_memory()
        model, optimizer, loader = accelerator.prepare(*slope_parts(num_rows=16, batch_size=batch_size))
        ends = []
        try:
            for (rows,) in loader:
                with accelerator.accumulate(model):
                    if len(rows) > largest_that_fits:
                        raise MemoryError
                    accelerator.backward(model(rows))
                    optimizer.step()
                    optimizer.zero_grad()
                    ends.append(accelerator.sync_gradients)
        except MemoryError:
            continue
        return model.weight.item(), ends
    raise AssertionError("nothing fits")


@pytest.mark.parametrize("num_parts", [2, 4])
def test_a_batch_that_does_not_fit_is_split(num_parts):
    sizes = (8, 4, 2)[: num_parts // 2 + 1]
    weight, ends = train_until_it_fits(Accelerator(cpu=True), sizes, largest_that_fits=sizes[-1])
    assert ends == ([False] * (num_parts - 1) + [True]) * 2
    assert weight == -(4.5 + 12.5)


class DistributedDataParallelKwargs:
    """Accelerate's, which is not needed: it is read by its name and its fields."""

    dim, bucket_cap_mb, broadcast_buffers, find_unused_parameters = 0, 25, True, False
    check_reduction, static_graph, comm_hook = False, False, "no"


class InitProcessGroupKwargs:
    """Accelerate's."""

    backend, init_method, timeout = "nccl", None, None


def test_settings_of_several_processes_that_would_be_ignored_are_refused():
    Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(), InitProcessGroupKwargs()])
    for kind, name, value in (
        (DistributedDataParallelKwargs, "broadcast_buffers", False),
        (DistributedDataParallelKwargs, "comm_hook", "fp16"),
        (InitProcessGroupKwargs, "backend", "mpi"),
    ):
        handler = kind()
        setattr(handler, name, value)
        with pytest.raises(RecipeError, match=name):
            Accelerator(cpu=True, kwargs_handlers=[handler])
