"""Every process takes whole batches: a place in the data, saved by one number of processes and loaded by others."""

from pathlib import Path

import pytest
from own_loops import rows
from torch.utils.data import DataLoader

from trimtab import Engine
from trimtab.errors import CheckpointError

NUM_ROWS, NUM_BATCHES_SEEN = 17, 2


def prepared():
    engine = Engine(cpu=True, split_batches=False)
    return engine, engine.prepare(DataLoader(rows(NUM_ROWS), batch_size=2))


def main(folder: Path) -> None:
    engine, loader = prepared()
    count = engine.num_processes
    own = folder / f"by-{count}"
    if NUM_BATCHES_SEEN % count == 0 and not own.exists():
        for _ in loader:
            if loader.num_delivered * count == NUM_BATCHES_SEEN:
                engine.save_state(own)
                break
    for state in sorted(folder.glob("by-*")):
        engine, loader = prepared()
        if NUM_BATCHES_SEEN % count:
            with pytest.raises(CheckpointError, match="2 batches.* 3 processes"):
                engine.load_state(state)
            assert loader.epoch == loader.num_delivered == 0
            continue
        engine.load_state(state)
        seen = []
        for batch in loader:
            seen += engine.gather_for_metrics(batch["row"]).tolist()
        assert seen == list(range(2 * NUM_BATCHES_SEEN, NUM_ROWS)), (count, state.name, seen)
        assert loader.epoch == 1
    (folder / f"done-{count}-{engine.process_index}").touch()
