"""One server of processes for all tests here, with models and rows."""

import json

import pytest
from fault_stage import ForkServer, Stage

from tiny_runs import NO_DROPOUT, reviews, write_csv

MODELS = {
    "bert": {},
    "no-dropout": NO_DROPOUT["bert"],
    "large": {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 4},
}


@pytest.fixture(scope="session")
def stage(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    server = ForkServer(folder)
    wanted = {name: {"name": "bert", **settings} for name, settings in MODELS.items()}
    made = server.start("make_models", root=str(folder / "models"), wanted=wanted, to=str(folder / "models.json"))
    assert made.wait() == 0, made.said
    rows = write_csv(folder / "reviews.csv", reviews(88))
    yield Stage(server, folder, json.loads((folder / "models.json").read_text()), rows)
    server.close()
