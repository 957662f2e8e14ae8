"""One stage for all tests here, with models and rows."""

import pytest
from fault_stage import Stage

from tiny_runs import NO_DROPOUT, reviews, write_csv

MODELS = {"bert": {}, "no-dropout": NO_DROPOUT["bert"]}


@pytest.fixture(scope="session")
def stage(fork_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    stage = Stage(fork_server, folder, write_csv(folder / "reviews.csv", reviews(88)))
    stage.make_models({name: {"name": "bert", **settings} for name, settings in MODELS.items()})
    return stage
