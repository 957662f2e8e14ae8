"""Loaders with `in_order=False`: whichever worker is faster, a resumed run sees every row once."""

import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from trimtab import Engine

# a machine of one core is told that two workers are many for it
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

NUM_ROWS = 10  # in batches of 2, of which the first worker loads every other one


class SlowRow(Dataset):
    """Loads one row only after another one, of the other worker, whose batch is ready first then."""

    def __init__(self, slow_row, other_row):
        self.slow_row, self.other_row = slow_row, other_row
        self.is_loaded = torch.zeros(NUM_ROWS, dtype=torch.bool).share_memory_()

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, row):
        if row == self.slow_row:
            end = time.monotonic() + 60
            while not self.is_loaded[self.other_row]:
                assert time.monotonic() < end
                time.sleep(0.01)
            time.sleep(0.5)  # the other batch is on its way
        self.is_loaded[row] = True
        return torch.tensor(row)


class SlowStream(IterableDataset, SlowRow):
    """The same as a stream: the two workers give batches of even and of odd rows."""

    def __iter__(self):
        worker = get_worker_info()
        for row in range(worker.id, NUM_ROWS, worker.num_workers):
            yield SlowRow.__getitem__(self, row)


def prepared(dataset):
    engine = Engine(cpu=True)
    return engine, engine.prepare(DataLoader(dataset, batch_size=2, num_workers=2, in_order=False))


@pytest.mark.parametrize("kind", [SlowRow, SlowStream])
def test_a_resumed_run_sees_every_row_once(tmp_path, monkeypatch, kind):
    lines = []
    monkeypatch.setattr("trimtab.engine.prepared_loader.log_info_once", lines.append)
    engine, loader = prepared(kind(slow_row=0, other_row=3))
    seen = []
    for batch in loader:
        seen += batch.tolist()
        engine.save_state(tmp_path / "state")
        break
    engine, loader = prepared(kind(slow_row=1, other_row=2))
    engine.load_state(tmp_path / "state")
    assert loader.loader.in_order is False, "the loader given is left as it was"
    for batch in loader:
        seen += batch.tolist()
    assert sorted(seen) == list(range(NUM_ROWS))
    assert "in_order=False" in lines[0]
