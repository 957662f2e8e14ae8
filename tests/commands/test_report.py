"""`trimtab report` and the page that every run writes, with real runs of tiny models."""

import http.client
import json
import re
import shlex
import subprocess
import sys
import threading
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tiny_runs import lines_of, reviews, write_csv, write_jsonl
from trimtab import Recipe, Stopped, fit
from trimtab.build.report_facts import HeldOutRows
from trimtab.commands.evaluate import evaluate_model
from trimtab.commands.report import make_page, write_page
from trimtab.errors import RecipeError
from trimtab.report.page.run_files import read_run
from trimtab.report.page.usage import pipeline_code, python_code
from trimtab.report.serve import report_server

pytestmark = pytest.mark.usefixtures("own_folder")


def quick(**settings):
    settings = {"train": {"max_steps": 6, "batch_size": 8, "log_every": 1, "lr": 1e-3}} | settings
    return fit(Recipe(**settings), progress="quiet", device="cpu")


def classified(tiny, out="run", **settings):
    data = {"train": str(write_csv(Path("reviews.csv").absolute(), reviews(60))), "max_length": 8, "eval_share": 0.3}
    return quick(model=tiny.folder("bert"), data=data, evaluate={"every": "3 steps"}, out=out, **settings)


def text_of(page):
    """The text of a page without its tags."""
    main = page.partition("<main>")[2].partition("</main>")[0].replace("<wbr>", "")
    return " ".join(re.sub(r"<[^>]*>", " ", main).split())


def run_code(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---------------------------------------------------------------------- what a run writes


def test_a_classifier_writes_its_report(tiny):
    result = classified(tiny, memory={"budget": "2GiB"})
    page = (result.folder / "report.html").read_text()
    text = text_of(page)
    for title in (
        *("Curves", "Predicted and measured", "Held-out rows", "Confusion matrix", "Rows with the highest loss"),
        *("Data", "Labels", "Lengths of training examples", "Plan", "Recipe", "Checkpoints", "Use the model"),
    ):
        assert title in text
    assert "Chosen: micro-batch 8" in text  # why
    assert re.search(r"train\.lr 0\.001 Python", text)
    assert re.search(r"peak memory of the process [\d.]+ [MG]iB [\d.]+ [MG]iB [+×-]", text)
    assert re.search(r"time of an optimizer step [\d.]+ m?s [\d.]+ m?s", text)
    assert "truncated at 8 tokens" in text
    assert f'load("{result.best.absolute()}")' in page.replace("&quot;", '"')
    charts = {one["id"]: one for one in json.loads(re.search(r'chart-data">(.*?)</script>', page)[1])["charts"]}
    assert {"loss", "metrics", "lr", "grad_norm", "tokens_per_s", "memory_bytes"} <= charts.keys()
    assert [step for step, _ in charts["loss"]["series"][0]["points"]] == [1, 2, 3, 4, 5, 6]
    assert {mark["label"] for mark in charts["memory_bytes"]["marks"]} == {"predicted peak", "measured peak", "budget"}


def test_held_out_rows_are_those_of_the_best_model(tiny):
    """The evaluation of the run and a new one with the saved model agree, row by row."""
    result = classified(tiny, train={"max_steps": 9, "batch_size": 8, "lr": 1e-2})
    found = json.loads((result.folder / "report.json").read_text())["held_out"]
    evaluated = evaluate_model(str(result.folder), num_worst=18, device="cpu").evaluation
    assert found["step"] == result.fit.best_step
    assert found["num_rows"] == evaluated.num_rows == 18
    assert found["labels"] == list(evaluated.labels)
    assert found["confusion"] == [list(row) for row in evaluated.confusion]
    check_worst(found["worst"], evaluated.worst)


def check_worst(found, evaluated):
    """Rows of nearly equal loss may be in another order."""
    assert len(found) == 10
    assert [row["loss"] for row in found] == pytest.approx([row.loss for row in evaluated[:10]], rel=1e-4)
    by_location = {row.location: row for row in evaluated}
    for row in found:
        other = by_location[row["location"]]
        assert (row["text"], row["label"]) == (other.text, other.label)
        assert row["loss"] == pytest.approx(other.loss, rel=1e-4)
        if other.predicted.replace(".", "").isdigit():
            assert float(row["predicted"]) == pytest.approx(float(other.predicted), rel=1e-3)
        else:
            assert row["predicted"] == (other.predicted or "none of the labels")


@pytest.mark.parametrize("kind", ["regress", "several labels", "limited", "packed", "many labels"])
def test_held_out_rows_of_other_tasks(tiny, kind):
    rows = reviews(40)
    if kind == "regress":
        rows = [row | {"label": str(len(row["text"]) / 10)} for row in rows]
    elif kind == "several labels":
        rows = [row | {"label": [row["label"], "long"] if len(row["text"]) > 20 else [row["label"]]} for row in rows]
    elif kind == "many labels":
        rows = [row | {"label": f"{row['label']} {number % 40}"} for number, row in enumerate(reviews(160))]
    data = {"train": str(write_jsonl(Path("rows.jsonl").absolute(), rows)), "eval_share": 0.5}
    more = {"limits": {"eval": 1}, "evaluate": {"batch_size": 4}} if kind == "limited" else {}
    more |= {"memory": {"padding": "none"}} if kind == "packed" else {}
    task = "regress" if kind == "regress" else "classify"
    result = quick(model=tiny.folder("bert"), task=task, data=data, out="run", **more)
    found = json.loads((result.folder / "report.json").read_text())["held_out"]
    assert found["num_rows"] == (4 if kind == "limited" else len(rows) // 2)
    assert (kind in ("limited", "packed", "many labels")) == ("confusion" in found)
    if kind != "limited":
        check_worst(found["worst"], evaluate_model(str(result.folder), num_worst=100, device="cpu").evaluation.worst)
    assert "Rows with the highest loss" in text_of((result.folder / "report.html").read_text())


@pytest.mark.samples
def test_the_report_of_a_language_model(tiny):
    rows = [{"text": " ".join(row["text"] for row in reviews(3, index))} for index in range(30)]
    data = {"train": str(write_jsonl(Path("texts.jsonl"), rows))}
    result = quick(model=tiny.folder("llama"), task="causal-lm", data=data, out="run")
    text = text_of((result.folder / "report.html").read_text())
    assert "Confusion matrix" not in text
    assert "Before training" in text
    assert "Lengths of training examples" in text


def test_an_interrupted_and_a_failed_run_write_their_reports(tiny):
    class Stop:
        def on_step(self, state):
            if state.step == 4:
                state.interrupt("signal SIGTERM")

    class Fail:
        def on_step(self, state):
            if state.step == 2:
                raise ValueError("<b>broken</b>")

    data = {"train": str(write_csv(Path("reviews.csv"), reviews(40)))}
    settings = {"model": tiny.folder("bert"), "data": data, "train": {"max_steps": 6, "log_every": 1}}
    with pytest.raises(Stopped):
        fit(Recipe(**settings, out="stopped"), callbacks=[Stop()], progress="quiet", device="cpu")
    text = text_of(Path("stopped/report.html").read_text())
    assert "stopped stopped" in text
    assert "ended by signal SIGTERM" in text
    assert "Steps 4 of 6" in text
    with pytest.raises(ValueError, match="broken"):
        fit(Recipe(**settings, out="failed"), callbacks=[Fail()], progress="quiet", device="cpu")
    page = Path("failed/report.html").read_text()
    assert "ValueError: &lt;b&gt;broken&lt;/b&gt;" in page
    assert "This run has no model. Continue it from" in page


def test_a_report_that_cannot_be_written_is_one_warning(tiny, monkeypatch, caplog):
    caplog.set_level("INFO", logger="trimtab")

    def fail(*arguments):
        raise OSError("no room")

    monkeypatch.setattr("trimtab.build.report_facts.run_page", fail)
    result = classified(tiny)
    assert result.fit.step == 6
    assert not (result.folder / "report.html").exists()
    assert [line for line in caplog.messages if "report" in line] == ["the report is not complete: OSError: no room"]


@pytest.mark.slow
def test_the_code_of_the_report_runs_as_it_stands(tiny, trimtab_command):
    result = classified(tiny)
    run = read_run(result.folder)
    assert re.fullmatch(r"\['(good|bad)'\]\n", run_code(python_code(run)))
    assert "'label': '" in run_code(pipeline_code(run))
    commands = re.findall(r"trimtab (?:predict|evaluate|resume) [^<\n]*", make_page([result.folder]))
    assert len(commands) == 3
    for command in commands:
        words = shlex.split(unescape(command), comments=True)
        code, _, err = trimtab_command(*words[1:])
        assert code == 0, err
    assert lines_of(result.folder)[-1]["step"] == 12  # trained twice as long
    rows = [{"text": row["text"]} for row in reviews(20)]
    result = quick(model=tiny.folder("llama"), task="causal-lm", data={"train": rows}, out="lm")
    run = read_run(result.folder)
    assert run_code(python_code(run)).strip()
    assert "generated_text" in run_code(pipeline_code(run))


# ---------------------------------------------------------------------- the command


def test_several_runs_are_shown_side_by_side(tiny, trimtab_command):
    for name, rate in (("one", 1e-3), ("two", 1e-2)):
        classified(tiny, f"runs/x/{name}", seed=5, train={"max_steps": 3, "lr": rate, "batch_size": 8})
    code, out, err = trimtab_command("report", "runs/x/one", "runs/x/two", "--out", "both.html")
    assert (code, out.strip()) == (0, "both.html"), err
    page = Path("both.html").read_text()
    assert "train.lr 0.001 0.01" in text_of(page)
    assert "seed" not in text_of(page).partition("Recipe keys")[2]
    charts = json.loads(re.search(r'chart-data">(.*?)</script>', page)[1])["charts"]
    assert all([series["name"] for series in one["series"]] == ["one", "two"] for one in charts)
    Path("runs/x/one/report.html").unlink()
    assert write_page([Path("runs/x/one")]) == Path("runs/x/one/report.html")
    Path("mine.html").write_text("<html>my own page</html>")
    with pytest.raises(RecipeError, match="not a trimtab report"):
        write_page([Path("runs/x/one")], Path("mine.html"))
    for wrong in (
        ["report", "nowhere"],
        ["report", "runs/x/one", "--port", "5"],
        ["report", "runs/x/one", "--samples", "2"],
    ):
        code, _, err = trimtab_command(*wrong)
        assert code == 2
        assert "cure:" in err


def get(port, path="/", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers=headers)
    reply = connection.getresponse()
    found = reply.status, reply.headers, reply.read().decode()
    connection.close()
    return found


def test_a_watched_report_shows_new_lines(tiny):
    folder = classified(tiny).folder
    server = report_server(lambda tag: make_page([folder], tag))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        host, port = server.server_address
        assert host == "127.0.0.1"
        status, headers, page = get(port)
        assert status == 200
        assert f'data-watch="{headers["ETag"].replace(chr(34), "&quot;")}"' in page
        assert get(port, **{"If-None-Match": headers["ETag"]})[0] == 304
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 7, "loss": 0.123456}) + "\n")
        status, later, page = get(port, **{"If-None-Match": headers["ETag"]})
        assert status == 200
        assert later["ETag"] != headers["ETag"]
        assert "[7,0.123456]" in page
        assert get(port, "/metrics.jsonl")[0] == 404
        assert get(port, Host="evil.example:80")[0] == 403
        with pytest.raises(RecipeError, match=f"port {port} cannot be used"):
            report_server(lambda tag: "", port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_run_that_trains_again_shows_no_results_of_its_last_attempt(tiny):
    folder = classified(tiny).folder
    assert "Training time" in make_page([folder])
    status = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(status | {"state": "running"}))  # killed: no process holds it
    text = text_of(make_page([folder]))
    assert "killed" in text
    assert "Training time" not in text
    assert "median so far" in text
    assert re.search(r"measured time of an optimizer step [\d.]+ m?s", text)


def test_files_that_are_damaged_or_missing():
    folder = Path("own")
    folder.mkdir()
    status = {"state": "finished", "step": 2, "num_steps": 2, "started": 1.0, "own_loop": True}
    (folder / "run.json").write_text(json.dumps(status))
    (folder / "metrics.jsonl").write_text(
        '{"config": {}}\n{"step": 1, "my loss": 3}\n{"step": 2, "my loss": "NaN"}\n{"st'
    )
    page = make_page([folder])
    assert '"points":[[1,3],[2,null]]' in page


def test_a_hundred_thousand_labels_take_no_matrix():
    """A matrix of them would have ten billion numbers."""
    task = SimpleNamespace(head=lambda: {"id2label": {number: f"label {number}" for number in range(100_000)}})
    tokens = SimpleNamespace(fields={"labels": torch.tensor([99_999, 5, 5, 7])})
    rows: Any = HeldOutRows(None, None, task, None, tokens)
    found = rows._confusions(torch.arange(4), torch.tensor([0, 6, 6, 7]))
    assert found == {"confusions": [["label 5", "label 6", 2], ["label 99999", "label 0", 1]]}
