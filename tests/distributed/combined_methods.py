"""Engine methods combined with each other and with other libraries; each process asserts its own results."""

from pathlib import Path

import datasets
import pytest
import torch
from own_loops import Tagger, loss_of, mean_over_rows, rows
from torch.utils.data import DataLoader
from transformers import BatchEncoding

from trimtab import Engine
from trimtab.errors import LossError, PrepareError, RecipeError


def are_same_everywhere(engine, tensor):
    theirs = engine.gather_for_metrics([tensor.detach()], use_gather_object=True)
    return all(torch.equal(one, theirs[0]) for one in theirs)


def two_models(engine):
    models = [torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    return engine.prepare(*models, *optimizers)


def own_input(engine, step=0):
    return torch.full((2, 3), 1.0 + engine.process_index + step)


def one_of_two_models_accumulates_by_itself():
    engine = Engine(cpu=True)
    first, second, *optimizers = two_models(engine)
    for step in range(2):
        with engine.no_sync(first):
            engine.backward(first(own_input(engine, step)).mean())
        assert not are_same_everywhere(engine, first.weight.grad)
        engine.backward(first(own_input(engine, step)).mean())
        assert are_same_everywhere(engine, first.weight.grad)
        optimizers[0].step()
        engine.backward(second(own_input(engine, step)).mean())
        assert are_same_everywhere(engine, second.weight.grad)
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def one_of_two_models_has_several_forwards():
    """The gradients of a sum of two losses of one model are averaged once; a loss of the other model is independent."""
    engine = Engine(cpu=True)
    first, second, *optimizers = two_models(engine)
    engine.backward(first(own_input(engine)).mean() + first(own_input(engine, 1)).mean())
    optimizers[0].step()
    engine.backward(second(own_input(engine)).mean())
    assert are_same_everywhere(engine, second.weight.grad)


def a_window_of_one_model_then_a_loss_of_another():
    engine = Engine(cpu=True, gradient_accumulation_steps=2)
    first, second, *_ = two_models(engine)
    for step in range(2):
        with engine.accumulate(first):
            engine.backward(first(own_input(engine, step)).mean())
    engine.backward(second(own_input(engine)).mean())
    assert are_same_everywhere(engine, first.weight.grad)
    assert are_same_everywhere(engine, second.weight.grad)


def models_that_share_a_parameter():
    engine = Engine(cpu=True)
    first, second = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    second.weight = first.weight
    first, second = engine.prepare(first, second)
    engine.backward(first(own_input(engine)).mean() + first(own_input(engine, 1)).mean())
    engine.backward(second(own_input(engine)).mean())
    assert are_same_everywhere(engine, second.bias.grad)


def a_second_backward_is_still_refused_next_to_another_model():
    engine = Engine(cpu=True)
    first, _, *_ = two_models(engine)
    one, other = (first(own_input(engine, step)).mean() for step in range(2))
    engine.backward(one)
    with pytest.raises(LossError, match="add the losses"):
        engine.backward(other)


def datasets_are_split_by_rows():
    engine = Engine(cpu=True)
    data = datasets.Dataset.from_dict({"text": list("abcde"), "label": list(range(5))})
    with engine.split_between_processes(data) as mine:
        assert isinstance(mine, datasets.Dataset)
        assert mine.column_names == data.column_names
        assert engine.gather_for_metrics([row["text"] for row in mine]) == list("abcde")
    with engine.split_between_processes(data, apply_padding=True) as mine:
        assert engine.gather_for_metrics(list(mine["label"])) == [0, 1, 2, 3, 4, 4]
    with engine.split_between_processes(data.select([0]), apply_padding=True) as mine:
        assert mine["text"][:] == ["a"]
    encoded = BatchEncoding({"input_ids": [[1], [2], [3]], "attention_mask": torch.ones(3, 1)})
    with engine.split_between_processes(encoded) as mine:
        assert engine.gather_for_metrics(list(mine["input_ids"])) == [[1], [2], [3]]
        assert len(mine["attention_mask"]) == len(mine["input_ids"])
    with pytest.raises(RecipeError, match="range cannot be padded"):
        engine.split_between_processes(range(3), apply_padding=True)


def accumulate_keeps_to_an_outer_no_sync():
    engine = Engine(cpu=True, gradient_accumulation_steps=2)
    model = Tagger()
    model, optimizer, loader = engine.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(rows(16), batch_size=4)
    )
    with model.no_sync():
        for batch in loader:
            with engine.accumulate(model):
                engine.backward(mean_over_rows(model, batch))
                assert not are_same_everywhere(engine, model.module.head.weight.grad)
                optimizer.step()
                optimizer.zero_grad()
        assert not are_same_everywhere(engine, model.module.head.weight)
        assert model.require_backward_grad_sync is False
    assert model.require_backward_grad_sync is True
    for parameter in model.parameters():
        parameter.data = engine.reduce(parameter.data, "mean")
    for batch in loader:
        with engine.accumulate(model):
            engine.backward(mean_over_rows(model, batch))
            same = are_same_everywhere(engine, model.module.head.weight.grad)
            assert same is engine.sync_gradients
            optimizer.step()
            optimizer.zero_grad()
    assert are_same_everywhere(engine, model.module.head.weight)


def forward_backward_is_backward():
    found = []
    for loss_function in (None, loss_of, mean_over_rows):
        engine = Engine(cpu=True, gradient_accumulation_steps=2)
        model = Tagger()
        model, optimizer, loader = engine.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(rows(13), batch_size=4)
        )
        for batch in loader:
            with engine.accumulate(model):
                if loss_function is None:
                    engine.backward(*loss_of(model, batch))
                else:
                    engine.forward_backward(model, batch, loss_function)
                optimizer.step()
                optimizer.zero_grad()
        assert are_same_everywhere(engine, model.module.head.weight)
        found.append(model.module.head.weight.detach())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def cuda_graphs_need_one_process():
    with pytest.raises(PrepareError, match="one process only, not with 2"):
        Engine(cpu=True, cuda_graphs=True).prepare(Tagger())


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    one_of_two_models_accumulates_by_itself()
    one_of_two_models_has_several_forwards()
    a_window_of_one_model_then_a_loss_of_another()
    models_that_share_a_parameter()
    a_second_backward_is_still_refused_next_to_another_model()
    datasets_are_split_by_rows()
    accumulate_keeps_to_an_outer_no_sync()
    forward_backward_is_backward()
    cuda_graphs_need_one_process()
