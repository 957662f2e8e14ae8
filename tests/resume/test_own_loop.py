"""A loop of one's own: N + M steps equal N, save, other objects, load, M; bit for bit, whatever the data comes from."""

import collections
import dataclasses
import functools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from trimtab import Engine
from trimtab.errors import CheckpointError

# a machine of one core is told that two workers are many for it
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

NUM_ROWS = 13
NUM_BATCHES = 5  # of 3 rows, the last one smaller
ROWS = torch.randn(NUM_ROWS, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(NUM_ROWS) % 2


class Rows(Dataset):
    """Counts what is loaded, in memory that workers share."""

    def __init__(self):
        self.num_loaded = torch.zeros(NUM_ROWS, dtype=torch.int64).share_memory_()

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        self.num_loaded[index] += 1
        return {"x": ROWS[index], "y": LABELS[index], "row": torch.tensor(index)}


class RowsWithState(Rows):
    """Map-style data may have a state dict for other purposes; its position is still kept by index."""

    def state_dict(self):
        return {"epochs": 3}

    def load_state_dict(self, state):
        raise AssertionError("a map-style dataset is not resumed by itself")


class Stream(IterableDataset, Rows):
    """Shuffled by Python's generator, which a resumed run has to bring back; cannot say its place."""

    def __iter__(self):
        order = list(range(NUM_ROWS))
        random.shuffle(order)
        worker = torch.utils.data.get_worker_info()
        for row in order if worker is None else order[worker.id :: worker.num_workers]:
            yield Rows.__getitem__(self, row)


class StreamWithPlace(IterableDataset, Rows):
    """Knows its place, its epoch and its own generator, and goes on from them by itself."""

    def __init__(self, seed=0):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.order: list[int] = []
        self.place = 0

    def __iter__(self):
        if not self.order:
            self.order = torch.randperm(NUM_ROWS, generator=self.generator).tolist()
        while self.place < NUM_ROWS:
            self.place += 1
            yield Rows.__getitem__(self, self.order[self.place - 1])
        self.order, self.place = [], 0

    def state_dict(self):
        return {"order": self.order, "place": self.place, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.order, self.place = state["order"], state["place"]
        self.generator.set_state(state["generator"])


class StreamOfEpoch(IterableDataset, Rows):
    """Takes a saved place only in the epoch that it belongs to, and once, as streams of `datasets` do."""

    def __init__(self):
        super().__init__()
        self.epoch = self.place = 0
        self.start: dict | None = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.place = self.start["place"] if self.start and self.start["epoch"] == self.epoch else 0
        for row in order[self.place :]:
            self.place += 1
            yield Rows.__getitem__(self, row)

    def state_dict(self):
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state):
        self.start = state


class LoaderWithPlace(DataLoader):
    """A loader that keeps its own place, whatever its data is."""

    epoch = place = 0

    def __iter__(self):
        order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(self.epoch)).split(3)
        while self.place < NUM_BATCHES:
            self.place += 1
            yield self.collate_fn([self.dataset[int(row)] for row in order[self.place - 1]])
        self.epoch, self.place = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state):
        self.epoch, self.place = state["epoch"], state["place"]


class SampledByEpoch(Sampler):
    """Order is a function of the epoch that it was told, and of nothing else."""

    def __init__(self):
        self.epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return NUM_ROWS

    def __iter__(self):
        assert self.epoch >= 0
        return iter(torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class DrawnAtOnce(Sampler):
    """Draws its order from the global generator when `iter` is called, not at the first index."""

    def __len__(self):
        return NUM_BATCHES

    def __iter__(self):
        return iter([rows.tolist() for rows in torch.randperm(NUM_ROWS).split(3)])


def collate(rows):
    return torch.utils.data.default_collate(rows)


def noisy(rows):
    """Draws from every generator of the host, as masking collators do."""
    batch = collate(rows)
    batch["x"] = batch["x"] + torch.randn(4) + random.random() + float(np.random.rand())
    return batch


class OwnBatch(collections.UserDict):
    """A batch of a class that is no state, as tokenizers make them."""


def own_batch(rows):
    return OwnBatch(noisy(rows))


def batches_of_three(rows, replacement=False):
    return BatchSampler(RandomSampler(rows, replacement=replacement, num_samples=None), 3, drop_last=False)


shuffled = functools.partial(DataLoader, batch_size=3, shuffle=True)
streamed = functools.partial(DataLoader, batch_size=3)
LOADERS = {
    "shuffled": lambda seed: shuffled(Rows()),
    "two workers": lambda seed: shuffled(Rows(), num_workers=2),
    "two workers that stay": lambda seed: shuffled(Rows(), num_workers=2, persistent_workers=True),
    "generator": lambda seed: shuffled(Rows(), generator=torch.Generator().manual_seed(seed)),
    "batch sampler": lambda seed: DataLoader(Rows(), batch_sampler=batches_of_three(range(NUM_ROWS))),
    "with replacement": lambda seed: DataLoader(Rows(), batch_sampler=batches_of_three(range(NUM_ROWS), True)),
    "drawn at once": lambda seed: DataLoader(Rows(), batch_sampler=DrawnAtOnce()),
    "sampler of the epoch": lambda seed: streamed(Rows(), sampler=SampledByEpoch()),
    "random collate": lambda seed: shuffled(Rows(), collate_fn=noisy),
    "map-style with a state": lambda seed: shuffled(RowsWithState()),
    "stream": lambda seed: streamed(Stream()),
    "stream, random collate": lambda seed: streamed(Stream(), collate_fn=noisy),
    "stream, two workers": lambda seed: streamed(Stream(), num_workers=2),
    "stream with place": lambda seed: streamed(StreamWithPlace(seed)),
    "stream with place, random collate": lambda seed: streamed(StreamWithPlace(seed), collate_fn=own_batch),
    "stream with place and generator": lambda seed: streamed(
        StreamWithPlace(seed), generator=torch.Generator().manual_seed(seed)
    ),
    "stream of the epoch": lambda seed: streamed(StreamOfEpoch()),
    "loader with place": lambda seed: LoaderWithPlace(Rows(), 3, collate_fn=noisy),
}
REPLAYED = {name for name in LOADERS if name.startswith("stream") and ("place" not in name and "epoch" not in name)}


class Net(torch.nn.Sequential):
    def __init__(self):
        linear = torch.nn.Linear
        super().__init__(linear(4, 16), torch.nn.GELU(), torch.nn.Dropout(0.3), torch.nn.LayerNorm(16), linear(16, 2))


class Progress:
    """What a loop counts by itself."""

    def __init__(self):
        self.num_batches = 0

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


@dataclasses.dataclass
class Run:
    """A loop with everything that it prepared, and a log of what it saw and did."""

    seed: int
    loader: str = "shuffled"
    num_epochs: int = 3
    batches_an_epoch: int = NUM_BATCHES
    engine: dict = dataclasses.field(default_factory=dict)
    weighted: bool = False

    def __post_init__(self):
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        np.random.seed(self.seed)
        model, self.progress, self.log = Net(), Progress(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        loader = LOADERS[self.loader](self.seed)
        self.dataset = loader.dataset
        self.engine = Engine(device="cpu", **self.engine)
        self.model, self.optimizer, self.batches, self.scheduler = self.engine.prepare(
            model, optimizer, loader, scheduler
        )
        self.engine.register_for_checkpointing(self.progress)

    def train(self, save_after=None, folder=None, after_batch=lambda run: None):
        """To the end. `save_after` is a number of batches, or of epochs and one half: then between two epochs."""
        while self.progress.num_batches < self.num_epochs * self.batches_an_epoch:
            for number, batch in enumerate(self.batches, 1):
                self.step(batch)
                self.progress.num_batches += 1
                after_batch(self)
                if self.progress.num_batches == save_after:
                    self.engine.save_state(folder)
                if number == self.batches_an_epoch:
                    break
            if self.progress.num_batches / self.batches_an_epoch + 0.5 == save_after:
                self.engine.save_state(folder)
        self.end = self.state_at_the_end()
        return self

    def step(self, batch):
        with self.engine.accumulate(self.model):
            loss = torch.nn.functional.cross_entropy(self.model(batch["x"]), batch["y"])
            self.engine.backward(loss, weight=len(batch["y"]) if self.weighted else None)
            self.engine.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.log.append((batch["row"].tolist(), loss.item(), self.scheduler.get_last_lr()[0]))

    def state_at_the_end(self):
        """All that must be equal at the end: weights, optimizer, and what every generator would draw next."""
        weights = [p.detach().view(torch.int32).flatten().tolist() for p in self.model.parameters()]
        moments = [v.tolist() for s in self.optimizer.state_dict()["state"].values() for v in s.values()]
        return weights, moments, torch.rand(2).tolist(), random.random(), float(np.random.rand())


def assert_resumes(tmp_path, save_after, num_before, **options):
    """Train with a save on the way; resume from it with objects of another seed; compare. Returns the resumed run."""
    whole = Run(seed=1, **options).train(save_after, tmp_path / "ckpt")
    resumed = Run(seed=2, **options)
    assert not torch.equal(resumed.model[0].weight, whole.model[0].weight)
    resumed.engine.load_state(tmp_path / "ckpt")
    assert resumed.progress.num_batches == num_before
    resumed.train()
    assert resumed.log == whole.log[num_before:]
    assert 0 < len(resumed.log) == len(whole.log) - num_before
    assert resumed.end == whole.end
    return resumed


PLACES = {"middle": 2, "last batch": NUM_BATCHES, "between epochs": 1.5, "second epoch": NUM_BATCHES + 3}


@pytest.mark.parametrize(
    ("loader", "place"),
    [
        # to start workers takes most of a second
        pytest.param(
            loader,
            place,
            marks=[pytest.mark.slow] if "workers" in loader and (loader, place) != ("two workers", "middle") else [],
        )
        for loader in LOADERS
        for place in PLACES
    ],
)
def test_resumed_anywhere_it_ends_with_the_same_bits(tmp_path, loader, place, caplog):
    save_after = PLACES[place]
    num_before = NUM_BATCHES if place == "between epochs" else save_after
    caplog.set_level("INFO", logger="trimtab")
    resumed = assert_resumes(tmp_path, save_after, num_before, loader=loader)
    is_at_boundary = save_after in (NUM_BATCHES, 1.5)
    replays = loader in REPLAYED and not is_at_boundary
    assert ("are read again" in caplog.text) == replays
    if not replays:  # what was seen before is not even loaded
        num_rows = sum(len(rows) for rows, _, _ in resumed.log)
        read_to_find_the_end = 3 * ("place" in loader and is_at_boundary)
        assert 0 < resumed.dataset.num_loaded.sum() <= num_rows + read_to_find_the_end


@pytest.mark.parametrize(
    "loader",
    [
        *("shuffled", "stream", "stream with place", "stream of the epoch"),
        pytest.param("two workers", marks=pytest.mark.slow),
    ],
)
def test_saved_with_its_last_batch_an_epoch_is_over(tmp_path, loader):
    """The next iteration is the next epoch: a loop that counts whole epochs continues with it."""
    Run(seed=1, loader=loader).train(NUM_BATCHES, tmp_path / "ckpt")
    resumed = Run(seed=2, loader=loader)
    resumed.engine.load_state(tmp_path / "ckpt")
    assert resumed.batches.epoch == 1
    assert len(list(resumed.batches)) == NUM_BATCHES


@pytest.mark.parametrize(("precision", "weighted"), [("no", False), ("no", True), ("bf16", False), ("fp16", False)])
@pytest.mark.parametrize("save_after", [1, 2, 3, 4, 5, 7])
def test_inside_a_window_of_accumulation(tmp_path, save_after, precision, weighted):
    """Windows are batches 1-3, 4-5, 6-8 …: the gradients of an open one are part of the state."""
    options = {"mixed_precision": precision, "gradient_accumulation_steps": 3}
    resumed = assert_resumes(tmp_path, save_after, save_after, weighted=weighted, engine=options)
    assert len({lr for _, _, lr in resumed.log}) > 2
    assert resumed.engine.scaler.is_scaling == (precision == "fp16")


def test_the_loss_scale_goes_on_after_an_overflow(tmp_path):
    def overflow(run):
        run.model[0].weight.data[0, 0] = {1: 1e30, 2: 0.1}.get(run.progress.num_batches, 0.2)

    options = {"engine": {"mixed_precision": "fp16"}, "num_epochs": 2}
    whole = Run(seed=1, **options).train(4, tmp_path / "ckpt", after_batch=overflow)
    assert whole.log[1][2] == whole.log[0][2]  # the second step was skipped, and the schedule waited
    resumed = Run(seed=2, **options)
    resumed.engine.load_state(tmp_path / "ckpt")
    assert resumed.engine.scaler.get_scale() < 2.0**16
    assert resumed.engine.num_skipped_steps == whole.engine.num_skipped_steps > 0
    resumed.train(after_batch=overflow)
    assert resumed.log == whole.log[4:]
    assert resumed.end == whole.end
    assert resumed.engine.scaler.get_scale() == whole.engine.scaler.get_scale()


@pytest.mark.parametrize(
    "loader",
    [
        *("shuffled", "generator", "stream", "stream with place", "stream of the epoch", "loader with place"),
        pytest.param("two workers", marks=pytest.mark.slow),
    ],
)
def test_epochs_that_are_left_early(tmp_path, loader):
    """Saved after a break, the next epoch is what it would have been."""
    resumed = assert_resumes(tmp_path, 1.5, 2, loader=loader, batches_an_epoch=2)
    assert len(resumed.log) == 4


def test_saving_changes_nothing(tmp_path):
    assert Run(seed=1).train(3, tmp_path / "ckpt").end == Run(seed=1).train().end


def test_saved_again_before_and_after_going_on(tmp_path):
    """A state that was loaded and not yet used is saved as it came, and a resumed run can be saved in its turn."""
    whole = Run(seed=1).train(3, tmp_path / "first")
    second = Run(seed=2)
    second.engine.load_state(tmp_path / "first")
    second.engine.save_state(tmp_path / "second")
    third = Run(seed=3)
    third.engine.load_state(tmp_path / "second")
    third.train(4, tmp_path / "third")
    assert third.log == whole.log[3:]
    fourth = Run(seed=4)
    fourth.engine.load_state(tmp_path / "third")
    assert fourth.train().log == whole.log[4:]
    assert fourth.end == whole.end


@pytest.mark.parametrize("loader", ["shuffled", "generator", "stream", "stream with place", "stream of the epoch"])
def test_skip_first_batches_after_load_state_does_not_skip_twice(tmp_path, loader):
    whole = Run(seed=1, loader=loader).train(3, tmp_path / "ckpt")
    resumed = Run(seed=2, loader=loader)
    resumed.engine.load_state(tmp_path / "ckpt")
    assert resumed.engine.skip_first_batches(resumed.batches, 3) is resumed.batches
    assert resumed.train().log == whole.log[3:]
    assert len(resumed.log) == 3 * NUM_BATCHES - 3
    assert resumed.end == whole.end


@pytest.mark.parametrize("loader", ["shuffled", "stream of the epoch"])
def test_skip_first_batches_sets_another_place(tmp_path, loader):
    """A loop that counts by itself is believed: the rest of the same epoch, from where it says."""
    whole = Run(seed=1, loader=loader).train(3, tmp_path / "ckpt")
    resumed = Run(seed=2, loader=loader)
    resumed.engine.load_state(tmp_path / "ckpt")
    resumed.engine.skip_first_batches(resumed.batches, 1)
    resumed.train()
    assert [rows for rows, _, _ in resumed.log[:4]] == [rows for rows, _, _ in whole.log[1:5]]


def test_an_evaluation_before_and_during_the_epoch(tmp_path):
    """Another loader that shares the generator: what it draws is drawn once, and the training order stays."""

    def run(seed):
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        engine = Engine(device="cpu")
        loaders = [shuffled(Rows(), generator=generator), shuffled(Rows(), generator=generator)]
        return engine, *engine.prepare(Net(), *loaders)

    def rows_of(loader):
        return [batch["row"].tolist() for batch in loader]

    engine, _, train, evaluate = run(1)
    seen = []
    for number, batch in enumerate(train):
        seen.append(batch["row"].tolist())
        if number == 1:
            rows_of(evaluate)
            engine.save_state(tmp_path / "ckpt")
            seen += rows_of(evaluate)
    expected = [*seen[2:], *rows_of(train), *rows_of(evaluate)]

    engine, _, train, evaluate = run(2)
    engine.load_state(tmp_path / "ckpt")
    assert [*rows_of(evaluate), *rows_of(train), *rows_of(train), *rows_of(evaluate)] == expected


def test_a_load_that_fails_in_the_middle_of_an_epoch_changes_nothing(tmp_path):
    """The loop continues, and the next epoch starts with its first batch."""

    class Refusing(Progress):
        def load_state_dict(self, state):
            raise LookupError("not today")

    def try_to_load(run):
        if run.progress.num_batches == 3:
            run.engine.save_state(tmp_path / "ckpt")
        if run.progress.num_batches == 4:
            with pytest.raises(CheckpointError, match="not today"):
                run.engine.load_state(tmp_path / "ckpt")

    for loader in ("shuffled", "generator", "stream", "stream with place"):
        plain = Run(seed=1, loader=loader).train()
        disturbed = Run(seed=1, loader=loader)
        disturbed.engine.register_for_checkpointing(Refusing())
        assert disturbed.train(after_batch=try_to_load).log == plain.log
        assert disturbed.end == plain.end


def test_an_iterator_that_is_replaced_ends_its_epoch():
    """`it = iter(loader)` drops the old iterator only after the new one was made."""
    run = Run(seed=1, loader="sampler of the epoch")
    iterator = iter(run.batches)
    first = next(iterator)["row"].tolist()
    iterator = iter(run.batches)
    second = [batch["row"].tolist() for batch in iterator]
    run.batches.set_epoch(0)
    plain = [[batch["row"].tolist() for batch in run.batches] for _ in range(2)]
    assert first == plain[0][0]
    assert second == plain[1]


def test_a_place_that_is_loaded_in_the_loop_holds_for_the_next(tmp_path):
    """Back to the checkpoint from inside the loop, and out of it."""
    run = Run(seed=1, loader="sampler of the epoch").train()
    for save_after, num_before in ((1.5, NUM_BATCHES), (7, 7)):
        whole = Run(seed=1, loader="sampler of the epoch").train(save_after, tmp_path / "ckpt")
        for _ in run.batches:
            run.engine.load_state(tmp_path / "ckpt")
            break
        run.log.clear()
        assert run.train().log == whole.log[num_before:]
        assert run.end == whole.end


def test_loaders_side_by_side_draw_one_after_the_other():
    """Each draws at its first batch, as plain loaders do behind generators, and not when `zip` calls `iter`."""

    def pairs(prepare):
        torch.manual_seed(1)
        loaders = [shuffled(Rows()), DataLoader(Rows(), batch_sampler=DrawnAtOnce()), streamed(Stream())]
        loaders = (
            Engine(device="cpu").prepare(*loaders)
            if prepare
            else [(batch for batches in [one] for batch in batches) for one in loaders]
        )
        random.seed(1)
        return [[batch["row"].tolist() for batch in batches] for batches in zip(*loaders, strict=True)]

    assert pairs(prepare=True) == pairs(prepare=False)


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_plain_loop_saved_between_two_backwards_of_one_step(precision, tmp_path):
    """The gradients saved are true ones; a resumed run has to know that before it adds to them."""

    def build():
        torch.manual_seed(2)
        engine = Engine(precision, device="cpu", gradient_accumulation_steps=3)
        if precision == "fp16":
            engine.scaler.load_state_dict({**engine.scaler.state_dict(), "scale": 1024.0})
        layer = torch.nn.Linear(3, 1)
        return engine, *engine.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))

    def backward(engine, model, rows):
        engine.backward(model(torch.full((rows, 3), 1.0 / rows)).mean(), weight=rows)

    whole = build()
    backward(*whole[:2], 2)
    whole[0].save_state(tmp_path / "state")
    backward(*whole[:2], 3)
    again = build()
    again[0].load_state(tmp_path / "state")
    backward(*again[:2], 3)
    assert torch.equal(again[1].weight.grad, whole[1].weight.grad)
    assert torch.allclose(whole[1].weight.grad, torch.full((1, 3), (2 / 2 + 3 / 3) / 5), rtol=2e-3)
