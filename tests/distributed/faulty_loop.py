"""A loop in which one rank differs: it is killed, sleeps, fails, saves alone, or has another recipe or other data."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from own_loops import Tagger, mean_over_rows, rows
from torch.utils.data import DataLoader

from trimtab import Engine, Recipe, TrimtabError, fit


def train(engine, folder, at_step):
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(rows(400), batch_size=4))
    for step, batch in enumerate(loader):
        engine.backward(mean_over_rows(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        if step == 5:
            engine._world.monitor._exchange.report_now(100)  # until the other ranks can read its progress
            at_step(engine, folder)


def killed(engine, folder):
    if engine.process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def asleep(engine, folder):
    if engine.process_index == 1:
        time.sleep(1000)


def failing(engine, folder):
    if engine.process_index == 1:
        raise ValueError("a bad row")


def saves_alone(engine, folder):
    if engine.is_main_process:
        engine.save_state(folder / "state")


def other_recipe(folder):
    lr = 1e-3 if os.environ["RANK"] == "0" else 2e-3
    recipe = {"model": (folder / "model").read_text(), "data": {"train": str(folder / "reviews.csv")}}
    fit(Recipe(**recipe, train={"lr": lr, "epochs": 1}, out=str(folder / "run")), device="cpu", progress="quiet")


def other_data(folder):
    name = "reviews.csv" if os.environ["RANK"] == "0" else "others.csv"
    os.symlink(folder / name, folder / f"link-{os.environ['RANK']}")
    os.chdir(folder / f"at-{os.environ['RANK']}")
    os.symlink(folder / name, "data.csv")
    recipe = {"model": (folder / "model").read_text(), "data": {"train": "data.csv"}}
    fit(Recipe(**recipe, train={"epochs": 1}, out=str(folder / "run")), device="cpu", progress="quiet")


def main(what: str, folder: str) -> None:
    torch.set_num_threads(1)
    try:
        if what.startswith("other"):
            globals()[what](Path(folder))
        else:
            train(Engine(cpu=True), Path(folder), globals()[what])
    except TrimtabError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
