"""Every method of the engine on several processes; each process asserts its own results."""

import logging
import random
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from own_loops import Tagger, mean_over_rows, rows
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from transformers.modeling_outputs import SequenceClassifierOutput

import trimtab.log
from trimtab import DistributedType, Engine
from trimtab.accelerate import Accelerator, DataLoaderConfiguration
from trimtab.distributed.consistency import require_same
from trimtab.errors import CheckpointError, PrepareError, RecipeError
from trimtab.log import logger


def gathers_and_reduces(engine):
    rank, count = engine.process_index, engine.num_processes
    ranks = list(range(count))
    assert engine.distributed_type == DistributedType.MULTI_CPU == "MULTI_CPU"
    assert engine.use_distributed
    assert (engine.is_main_process, engine.is_last_process) == (rank == 0, rank == count - 1)
    assert engine.gather(torch.tensor(rank)).tolist() == ranks
    assert engine.gather(torch.tensor([[rank, rank]])).tolist() == [[r, r] for r in ranks]
    uneven = engine.gather(torch.full((rank + 1,), rank))
    assert uneven.tolist() == [r for r in ranks for _ in range(r + 1)]
    for dtype in (torch.bool, torch.bfloat16, torch.float16, torch.int8, torch.float64):
        assert engine.gather(torch.tensor([rank], dtype=dtype)).dtype is dtype
        assert engine.gather(torch.tensor([rank], dtype=dtype)).tolist() == [
            bool(r) if dtype is torch.bool else r for r in ranks
        ]
    nested = engine.gather({"a": torch.tensor([rank]), "b": [torch.tensor(rank), (torch.tensor([rank + 1]),)]})
    assert nested["a"].tolist() == ranks
    assert nested["b"][1][0].tolist() == [r + 1 for r in ranks]
    assert engine.reduce(torch.tensor(rank + 1.0)).item() == sum(r + 1 for r in ranks)
    assert engine.reduce(torch.tensor([rank, 2 * rank]), "mean").tolist() == [
        sum(ranks) / count,
        2 * sum(ranks) / count,
    ]
    assert engine.reduce({"x": torch.tensor(1.0)}, scale=0.5)["x"].item() == count / 2
    own = torch.tensor(1.0)
    engine.reduce(own)
    assert own.item() == 1.0, "reduce returns a new tensor"
    with pytest.raises(RecipeError, match="reduction"):
        engine.reduce(own, "median")
    padded = engine.pad_across_processes(torch.ones(2, rank + 1), dim=1, pad_index=9)
    assert padded.shape == (2, count)
    assert (padded[:, rank + 1 :] == 9).all()
    first = engine.pad_across_processes(torch.ones(rank + 1), pad_first=True)
    assert first.tolist() == [0.0] * (count - rank - 1) + [1.0] * (rank + 1)
    with pytest.raises(RecipeError, match="pad_across_processes"):
        engine.gather(torch.ones(1, rank + 1))
    assert engine.gather_for_metrics(["a", rank]) == [item for r in ranks for item in ("a", r)]
    assert engine.gather_for_metrics({"rank": rank}, use_gather_object=True) == [{"rank": r} for r in ranks]


def splits(engine):
    count = engine.num_processes
    with engine.split_between_processes(list(range(7))) as mine:
        assert engine.gather_for_metrics(list(mine)) == list(range(7))
        assert abs(len(mine) - 7 / count) < 1
    with engine.split_between_processes({"a": list(range(4)), "b": torch.arange(4)}, apply_padding=True) as mine:
        assert len(mine["a"]) == len(mine["b"]) == -(-4 // count)
        assert mine["a"][0] == mine["b"][0]
    with engine.split_between_processes(torch.arange(1), apply_padding=True) as mine:
        assert mine.tolist() == [0]
    with pytest.raises(RecipeError, match="split_between_processes"):
        engine.split_between_processes(7)


def takes_turns(engine, folder):
    with engine.main_process_first():
        if engine.is_main_process:
            (folder / "first").write_text("was here")
        assert (folder / "first").exists()
    with engine.local_main_process_first():
        pass
    engine.wait_for_everyone()
    assert engine.on_main_process(lambda: 1)() == (1 if engine.is_main_process else None)
    assert not engine.check_trigger()
    if engine.is_last_process:
        engine.set_trigger()
    assert engine.check_trigger()
    assert not engine.check_trigger()
    assert engine.decide_on_main_process(lambda: engine.process_index) == 0
    with pytest.raises(RecipeError, match="all of us"):
        engine.decide_on_main_process(lambda: fail())


def fail():
    raise RecipeError("all of us", "see this")


def finds_differences(engine):
    engine.require_same("recipe", {"train.lr": 1e-3})
    with pytest.raises(RecipeError, match=r"rank 1 has train.lr 0.002, the others have 0.001"):
        engine.require_same("recipe", {"train.lr": 2e-3 if engine.process_index == 1 else 1e-3})
    require_same(engine._world, "versions", {"torch": torch.__version__})


def exchanges_only_where_a_window_ends():
    engine = Engine(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = Tagger(), None
    loader = DataLoader(rows(8), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = engine.prepare(model, optimizer, loader)
    assert model.embedding.num_embeddings == 50, "the wrapper has the attributes of the model"
    assert engine.unwrap_model(model) is model.module
    same = []
    for batch in loader:
        with engine.accumulate(model):
            engine.backward(mean_over_rows(model, batch))
            gradients = engine.gather_for_metrics([model.module.head.weight.grad.clone()], use_gather_object=True)
            same.append(all(torch.equal(one, gradients[0]) for one in gradients))
            optimizer.step()
            if engine.sync_gradients:
                sizes = [(p.grad.nbytes, p.grad.untyped_storage().nbytes()) for p in model.parameters()]
                assert all(whole > part for part, whole in sizes), "gradients are views of the buckets"
            optimizer.zero_grad()
    assert same == [False, True]
    batch = next(iter(loader))
    with engine.no_sync(model):
        engine.backward(mean_over_rows(model, batch))
    gradients = engine.gather_for_metrics([model.module.head.weight.grad.clone()], use_gather_object=True)
    assert not torch.equal(gradients[0], gradients[1])


def dropout_differs_and_repeats():
    def masks():
        engine = Engine(cpu=True, seed=11)
        model = engine.prepare(Tagger(dropout=0.5))
        return [
            engine.gather_for_metrics([model(torch.arange(12)[None]).detach()], use_gather_object=True)
            for _ in range(2)
        ]

    first, again = masks(), masks()
    for one, other in zip(first, again, strict=True):
        assert not torch.equal(one[0], one[1])
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    torch.manual_seed(11)
    alone = Tagger(dropout=0.5)(torch.arange(12)[None])
    assert torch.equal(first[0][0], alone), "rank 0 draws the same numbers as a single process"


def evaluates_every_row_once():
    engine = Engine(cpu=True)
    data = rows(7)
    for options in ({"batch_size": 3}, {"batch_size": 4}, {"batch_size": 1}, {"batch_size": 3, "num_workers": 1}):
        loader = engine.prepare(DataLoader(data, **options))
        assert len(loader) == -(-7 // options["batch_size"])
        seen = []
        for batch in loader:
            seen += engine.gather_for_metrics(batch["row"]).tolist()
        assert seen == list(range(7)), (options, seen)
    shuffled = engine.prepare(DataLoader(data, batch_size=3, shuffle=True))
    orders = [[row for b in shuffled for row in engine.gather_for_metrics(b["row"]).tolist()] for _ in range(2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(7))
    whole = Engine(cpu=True, split_batches=False)
    loader = whole.prepare(DataLoader(data, batch_size=2))
    assert len(loader) == -(-4 // whole.num_processes)
    seen = []
    for batch in loader:
        assert len(batch["row"]) <= 2
        seen += whole.gather_for_metrics(batch["row"]).tolist()
    assert seen == list(range(7))
    divided = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))
    assert len(engine.prepare(divided)) == len(divided)
    pairs = engine.prepare(DataLoader(TensorDataset(torch.arange(5), torch.arange(5)), batch_size=5))
    for one, other in pairs:
        assert torch.equal(one, other)
        assert len(one) == len(range(engine.process_index, 5, engine.num_processes))
    unlike = DataLoader(data, batch_size=3, sampler=_OwnOrder(7))
    with pytest.raises(RecipeError, match="rank 1 has first rows"):
        list(engine.prepare(unlike))


class _OwnOrder(torch.utils.data.Sampler):
    """Another order on every process, which a seed of the loader does not change."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self):
        first = dist.get_rank()
        return iter([*range(first, self.count), *range(first)])


def refuses_unused_parameters():
    class Wide(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)

        def forward(self, values):
            return self.used(values)

    engine = Engine(cpu=True)
    model = engine.prepare(Wide())
    with pytest.raises(PrepareError, match=r"idle.weight, idle.bias.*\n.*find_unused_parameters=True"):
        engine.backward(model(torch.ones(1, 2)).mean())
    engine = Engine(cpu=True, find_unused_parameters=True)
    wide = Wide()
    model, optimizer = engine.prepare(wide, torch.optim.SGD(wide.parameters(), lr=0.0))
    for _ in range(2):
        engine.backward(model(torch.ones(1, 2)).mean(), weight=1.0 if engine.is_main_process else 0.0)
        assert model.idle.weight.grad is None
        assert model.used.weight.grad.tolist() == [[1.0, 1.0]]
        optimizer.step()
        optimizer.zero_grad()
    frozen = Wide().requires_grad_(False)
    assert engine.prepare(frozen) is frozen


def trains_two_models_against_each_other():
    """A loss of one of two models, although both ran forward; gradients are the same on all ranks."""
    engine = Engine(cpu=True)
    maker, judge = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
    with torch.no_grad():
        for parameter in (*maker.parameters(), *judge.parameters()):
            parameter.fill_(0.1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (maker, judge)]
    maker, judge, *optimizers = engine.prepare(maker, judge, *optimizers)
    for step in range(3):
        made = maker(torch.full((2, 3), float(engine.process_index + step)))
        engine.backward(judge(made.detach()).mean())
        optimizers[1].step()
        optimizers[1].zero_grad()
        engine.backward(-judge(made).mean())
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    for parameter in (*maker.parameters(), *judge.parameters()):
        theirs = engine.gather_for_metrics([parameter.detach()], use_gather_object=True)
        assert all(torch.equal(one, theirs[0]) for one in theirs)


def gathers_objects_of_real_rows_only():
    engine = Engine(cpu=True)
    loader = engine.prepare(DataLoader(rows(5), batch_size=4))
    names, batches = [], 0
    for batch in loader:
        names += engine.gather_for_metrics([f"row {row}" for row in batch["row"].tolist()])
        batches += len(engine.gather_for_metrics({"any": "thing"}, use_gather_object=True))
    assert names == [f"row {row}" for row in range(5)]
    assert batches == min(4, engine.num_processes) + 1
    whole = Engine(cpu=True, split_batches=False)
    loader = whole.prepare(DataLoader(rows(5), batch_size=None))
    seen = [row for batch in loader for row in whole.gather_for_metrics([int(batch["row"])])]
    assert seen == list(range(5))
    assert len(loader) == -(-5 // whole.num_processes)


def counts_schedules_by_whose_batch_it_is():
    """A schedule of 12 steps and 12 batches ends after an epoch, with shared batches and with one per process."""

    def ended_with(accumulation=1, **settings):
        engine = Engine(cpu=True, gradient_accumulation_steps=accumulation, **settings)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 12))
        loader = DataLoader(torch.ones(24, 1), batch_size=2)
        model, optimizer, schedule, loader = engine.prepare(model, optimizer, schedule, loader)
        for batch in loader:
            with engine.accumulate(model):
                engine.backward(model(batch).mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        return schedule.get_last_lr(), len(loader)

    count = Engine(cpu=True).num_processes
    said = Said()
    assert ended_with() == ([0.0], 12)
    assert ended_with(split_batches=False) == ([0.0], 12 // count)
    assert ended_with(dataloader_config=DataLoaderConfiguration()) == ([0.0], 12 // count)
    assert ended_with(dataloader_config=DataLoaderConfiguration(split_batches=True)) == ([0.0], 12)
    assert ended_with(step_scheduler_with_optimizer=False, split_batches=False)[0] == [1 - (12 // count) / 12]
    said.stop()
    each = "1" if count == 2 else "0 or 1"
    assert said.lines == [
        f"batches of 2 are divided among {count} processes, {each} rows each; schedulers step once per optimizer step "
        f"(split_batches=False: 2 rows each, {count} steps, as in Accelerate)",
        f"batches of 2 on each of {count} processes; schedulers step {count} times per optimizer step, as in "
        f"Accelerate (split_batches=True: {each} rows each, one step)",
    ], said.lines


class Said(logging.Handler):
    """Records log lines, including those that are logged only once per process."""

    def __init__(self):
        super().__init__()
        self.lines = []
        self._before = logger.level
        trimtab.log._logged_once.clear()
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record):
        self.lines.append(record.getMessage())

    def stop(self):
        logger.removeHandler(self)
        logger.setLevel(self._before)


def reads_on_the_first_process_only():
    class Counted(list):
        num_read = 0

        def __getitem__(self, index):
            self.num_read += 1
            return super().__getitem__(index)

    data = Counted(range(7))
    engine = Engine(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True, dispatch_batches=True))
    loader = engine.prepare(DataLoader(data, batch_size=3, shuffle=True))
    for _ in range(2):
        seen = [row for batch in loader for row in engine.gather_for_metrics(batch).tolist()]
        assert sorted(seen) == list(range(7))
    assert data.num_read == (14 if engine.is_main_process else 0)


def joins_processes_that_have_fewer_batches():
    """Ranks without a last row contribute zero gradients, and all end with the same weights."""
    engine = Engine(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    count = engine.num_processes
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(torch.ones(count + 1, 1), batch_size=1)
    model, optimizer, loader = engine.prepare(model, optimizer, loader)
    num_batches = 0
    with engine.join_uneven_inputs([model]):
        for batch in loader:
            engine.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            num_batches += 1
    assert num_batches == len(loader) == (2 if engine.is_main_process else 1)
    weights = engine.gather(model.module.weight.detach()).reshape(-1).tolist()
    assert weights == [weights[0]] * count
    assert weights[0] == pytest.approx(-(1 + 1 / count)), weights


def one_cycle_ends_where_it_is_over():
    """OneCycleLR raises after its last step; the number of batches is not divisible by the number of processes."""
    engine = Engine(cpu=True, split_batches=False)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=7)
    loader = DataLoader(torch.ones(7, 1), batch_size=1)
    model, optimizer, schedule, loader = engine.prepare(model, optimizer, schedule, loader)
    for batch in loader:
        engine.backward(model(batch).mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert schedule.scheduler._step_count == 8


def shuffles_alike_without_a_seed():
    """Processes have different initial seeds: that of rank 0 is used."""
    torch.manual_seed(100 + torch.distributed.get_rank())
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    loader = accelerator.prepare(DataLoader(torch.arange(12), batch_size=2, shuffle=True))
    seen = [row for batch in loader for row in accelerator.gather(batch).tolist()]
    assert sorted(seen) == list(range(12))


def saves_in_an_open_window_as_accelerate_does(folder):
    """No gradients are saved and the window continues; an Engine, which saves them, raises there."""

    def trained(save):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.arange(24.0).reshape(24, 1)))
        for number, batch in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                if save and not accelerator.sync_gradients:
                    accelerator.save_state(folder / f"open-{number}")
                optimizer.step()
                optimizer.zero_grad()
        return model.module.weight.detach().clone(), accelerator, model

    plain, _, _ = trained(save=False)
    saved, accelerator, model = trained(save=True)
    assert torch.equal(plain, saved)
    accelerator.load_state(folder / "open-0")
    assert model.module.weight.item() == 1.0
    output = SequenceClassifierOutput(logits=torch.full((1, 2), float(accelerator.process_index)))
    assert accelerator.gather(output).logits.shape == (accelerator.num_processes, 2)


def saves_and_resumes(folder):
    def built():
        engine = Engine(cpu=True, seed=3)
        model = Tagger(dropout=0.3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = DataLoader(rows(15), batch_size=4, shuffle=True)
        return engine, *engine.prepare(model, optimizer, loader)

    def run(engine, model, optimizer, loader, num_batches, save_after=None):
        done, losses = 0, []
        while done < num_batches:
            for batch in loader:
                loss = mean_over_rows(model, batch)
                engine.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
                done += 1
                if done == save_after:
                    assert Path(engine.save_state(folder / f"state-{engine.process_index}")).name == "state-0"
                if done == num_batches:
                    break
        return losses

    whole = built()
    losses = run(*whole, 11, save_after=6)
    resumed = built()
    random.seed(99)
    resumed[0].load_state(folder / "state-0")
    assert run(*resumed, 5) == losses[6:]
    for one, other in zip(whole[1].parameters(), resumed[1].parameters(), strict=True):
        assert torch.equal(one, other)
    rank = resumed[0].process_index
    with pytest.raises(CheckpointError, match="rank 1 cannot load" if rank == 0 else "is no"):
        resumed[0].load_state(folder / ("state-0" if rank == 0 else "nowhere"))
    engine = Engine(cpu=True, gradient_accumulation_steps=2)
    model, loader = engine.prepare(Tagger(), DataLoader(rows(8), batch_size=4))
    for batch in loader:
        with engine.accumulate(model):
            engine.backward(mean_over_rows(model, batch))
        if not engine.sync_gradients:
            with pytest.raises(CheckpointError, match="accumulation window"):
                engine.save_state(folder / "half")
    with pytest.raises(CheckpointError, match="is a file"):
        engine.save_state(folder / "first")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    engine = Engine(cpu=True)
    gathers_and_reduces(engine)
    splits(engine)
    takes_turns(engine, folder)
    finds_differences(engine)
    exchanges_only_where_a_window_ends()
    dropout_differs_and_repeats()
    evaluates_every_row_once()
    refuses_unused_parameters()
    trains_two_models_against_each_other()
    gathers_objects_of_real_rows_only()
    counts_schedules_by_whose_batch_it_is()
    one_cycle_ends_where_it_is_over()
    shuffles_alike_without_a_seed()
    saves_in_an_open_window_as_accelerate_does(folder)
    reads_on_the_first_process_only()
    joins_processes_that_have_fewer_batches()
    saves_and_resumes(folder)
    (folder / f"done-{engine.process_index}").write_text("all")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
