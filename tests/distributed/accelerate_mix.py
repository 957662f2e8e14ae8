"""Functions of Accelerate next to an Engine, in two processes. Run by torchrun."""

import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from trimtab import Engine


def gathers(rank):
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list, gather_object

    assert PartialState().num_processes == 2
    assert PartialState().process_index == rank
    assert gather_object([f"of {rank}"]) == ["of 0", "of 1"]
    assert broadcast_object_list([rank]) == [0]


def trains_locally(engine):
    """The loop of Accelerate's example: models differ until they are averaged, after every second step."""
    from accelerate.local_sgd import LocalSGD

    engine.gradient_accumulation_steps = 2
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.arange(32.0).reshape(16, 2))
    model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
    differ = []
    with LocalSGD(accelerator=engine, model=model, local_sgd_steps=4, enabled=True) as local_sgd:
        for (batch,) in loader:
            with engine.accumulate(model):
                engine.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
            weights = engine.gather_for_metrics([model.module.weight.detach()], use_gather_object=True)
            differ.append(not torch.equal(*weights))
    assert differ == [False, True, True, False], differ


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    is_early = folder.name == "early"
    if is_early:
        import accelerate.utils  # noqa: F401
    assert ("accelerate" in sys.modules) is is_early
    environment, num_threads = dict(os.environ), torch.get_num_threads()
    engine = Engine(cpu=True)
    gathers(engine.process_index)
    Engine(cpu=True)
    assert dict(os.environ) == environment
    assert torch.get_num_threads() == num_threads
    trains_locally(engine)
    (folder / f"done-{engine.process_index}").write_text("all")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
