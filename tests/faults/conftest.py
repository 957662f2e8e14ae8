"""One server of processes for all tests here, with models and rows."""

import pytest
from fault_stage import ForkServer, Stage

from tiny_runs import NO_DROPOUT, reviews, write_csv

MODELS = {"bert": {}, "no-dropout": NO_DROPOUT["bert"]}


@pytest.fixture(scope="session")
def stage(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    server = ForkServer(folder)
    stage = Stage(server, folder, write_csv(folder / "reviews.csv", reviews(88)))
    stage.make_models({name: {"name": "bert", **settings} for name, settings in MODELS.items()})
    yield stage
    server.close()
