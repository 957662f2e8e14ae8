"""benchmarks/peers.py: what it measures, what it tells, and that all libraries train on the same rows."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("peers", "peer_tools", "peer_works")


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name)


def run_of(tokens_per_s, number, **more):
    measures = {"peak_bytes": 2**30, "first_step_s": 5.0, "wall_s": 9.0}
    return {"round": number, "tokens_per_s": tokens_per_s, **measures, **more}


def test_clock_syncs_at_the_ends_of_blocks_and_counts_the_second_half(peers, monkeypatch):
    now, syncs = [0.0], []
    clock_of_the_host = SimpleNamespace(
        monotonic=lambda: now[0], perf_counter=lambda: now[0], process_time=lambda: 2 * now[0]
    )
    monkeypatch.setattr(peers.peer_tools, "time", clock_of_the_host)
    clock = peers.peer_tools.Clock(40, started=-3.0, synchronize=lambda: syncs.append(clock.num_done))
    for step in range(1, 41):
        now[0] += 100.0 if step <= 20 else 2.0 if step == 30 else 1.0  # slow to start, and one slow step later
        clock.step()
    assert syncs == [1, *range(2, 41, 2)]
    found = clock.speeds([999] * 20 + [10] * 20)
    assert clock.first_step_s == 103.0
    assert found["block_tokens_per_s"] == [10, 10, 10, 10, 7, 10, 10, 10, 10, 10]
    assert found["tokens_per_s"] == 10.0
    assert found["tokens_per_s_overall"] == pytest.approx(200 / 21)
    assert found["tokens_per_cpu_s"] == pytest.approx(200 / 42)


def test_clock_refuses_a_run_with_other_steps(peers):
    clock = peers.peer_tools.Clock(4, 0.0, lambda: None)
    clock.step()
    with pytest.raises(AssertionError, match="1 steps were made, not 4"):
        clock.speeds([1] * 4)


def test_summary_compares_within_rounds_and_keeps_failures(peers):
    runs = {
        "trimtab": [run_of(300, 0), run_of(600, 1)],
        "trimtab memory.attention_backend=flash": [run_of(200, 0), {"round": 1, "failure": "out of memory"}],
        "hf-trainer": [run_of(100, 0), run_of(150, 1)],
        "torch": [run_of(1000, 0), run_of(1000, 1)],
        "lightning": [{"round": 0, "failure": "not installed: lightning"}],
        "accelerate": [],
    }
    found = peers.peers.summary(runs)
    assert found["tools"]["trimtab"]["tokens_per_s"] == {"median": 450, "low": 300, "high": 600}
    assert found["tools"]["lightning"] == {"failure": "not installed: lightning"}
    assert found["tools"]["accelerate"] == {"failure": "not run"}
    ratios = found["ratios"]
    assert ratios["trimtab"] == {"best_peer": "hf-trainer", "median": 3.5, "low": 3.0, "high": 4.0}
    assert set(ratios) == {"trimtab", "trimtab memory.attention_backend=flash"}  # a plain loop is not a peer
    text = peers.peers.markdown({"setting": {}, "summary": found})
    assert "| trimtab | 450 (300 – 600) | 1.00 | 5.0 | 9.0 |" in text
    assert "| lightning | not installed: lightning |" in text
    assert "| trimtab memory.attention_backend=flash | 200 (1 runs; out of memory) |" in text


@pytest.mark.parametrize("name", ["hf", "hf-trainer+fast", "trimtab+liger", "accelerate train.lr=1"])
def test_tools_that_do_not_exist_are_refused(peers, name):
    with pytest.raises(ValueError, match="is not a tool"):
        peers.peer_tools.parse(name)


def test_every_work_names_tools_and_has_a_small_form(peers):
    assert len(peers.peer_works.WORKS) == 8
    for work in peers.peer_works.WORKS.values():
        small = work.small()
        for name in (*work.peers, *small.peers):
            peers.peer_tools.parse(name)
        assert not any("liger" in name or "compile" in name for name in small.peers)
        assert len(set(small.peers)) == len(small.peers) > 0


def test_lengths_have_the_means_that_the_works_name(peers):
    works = peers.peer_works.WORKS
    assert 258 < sum(works["bert-imdb"].lengths.draw(20_000)) / 20_000 < 268
    assert 194 < sum(works["instruct-1b-lora"].lengths.draw(20_000)) / 20_000 < 206
    assert set(works["llama-8b-lora"].lengths.draw(5)) == {2048}


@pytest.mark.parametrize("name", ["bert-imdb", "llama-1b-full", "instruct-1b-lora"])
def test_trimtab_and_the_peers_read_the_same_tokens(peers, name, tmp_path):
    from trimtab import Recipe
    from trimtab.build.data import build_data
    from trimtab.model.load import load_tokenizer

    work = peers.peer_works.WORKS[name].small()
    lengths = work.lengths.draw(12)
    peers.peer_works.write_tokenizer(tmp_path / "tokenizer")
    peers.peer_works.write_jsonl(peers.peer_works.made_rows(work.task, lengths), tmp_path / "train.jsonl")
    (tmp_path / "lengths.json").write_text(json.dumps(lengths))
    theirs = peers.peer_works.read_tokens(tmp_path, work, max(lengths))
    assert [len(row["input_ids"]) for row in theirs] == lengths

    job = peers.peer_tools.Job(work, tmp_path, tmp_path, 0, "cpu")
    data = build_data(Recipe.model_validate(peers.peer_tools.recipe_of(job)))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    data.task.bind(tokenizer)
    ours = data.task.encode(data.train, tokenizer, max(lengths))
    assert len(ours) == len(theirs)
    for own, row in zip((ours[index] for index in range(len(ours))), theirs, strict=True):
        assert own["input_ids"].tolist() == row["input_ids"]
        if "labels" in own:
            assert own["labels"].tolist() == row["labels"]


def test_the_tokens_of_an_epoch_whose_last_batch_is_smaller(peers, tmp_path):
    from dataclasses import replace

    from trimtab import Recipe

    (tmp_path / "lengths.json").write_text(json.dumps(list(range(1, 31))))
    work = replace(peers.peer_works.WORKS["bert-imdb"].small(), num_steps=8, batch_size=4)
    job = peers.peer_tools.Job(work, tmp_path, tmp_path, 0, "cpu")
    found = peers.peer_tools.tokens_of_steps(Recipe.model_validate(peers.peer_tools.recipe_of(job)), job)
    assert len(found) == 8
    assert sum(found) == 31 * 15


def test_chart_has_every_tool_that_ran(peers, tmp_path, monkeypatch):
    pictures = importlib.import_module("pictures")
    runs = {"trimtab": [run_of(300, 0), run_of(600, 1)], "hf-trainer": [run_of(100, 0)]}
    runs["lightning"] = [{"round": 0, "failure": "not installed: lightning"}]
    report = {"work": "bert-imdb", "setting": {"hardware": "some GPU; a host"}, "summary": peers.peers.summary(runs)}
    pictures.draw_speed(report, tmp_path / "speed.svg")
    text = (tmp_path / "speed.svg").read_text()
    assert "<!-- trimtab -->" in text
    assert "<!-- hf-trainer -->" in text
    assert "lightning" not in text
    sys.modules.pop("pictures")


def run_peers(*arguments):
    command = [sys.executable, str(BENCHMARKS / "peers.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_command_measures_and_writes(tmp_path):
    path = tmp_path / "found.json"
    chosen = ["--peers", "accelerate", "--vary", "train.group_by_length=false", "--device", "cpu", "--threads", "1"]
    text = run_peers("bert-imdb", "--small", *chosen, "--out", str(path))
    report = json.loads(path.read_text())
    assert set(report["runs"]) == {"trimtab", "trimtab train.group_by_length=false", "accelerate"}
    for (run,) in report["runs"].values():
        assert "failure" not in run
        assert run["tokens_per_s"] > 0
        assert 0 < run["first_step_s"] < run["wall_s"]
        assert run["peak_bytes"] > 0
    assert len({run["num_tokens"] for (run,) in report["runs"].values()}) == 1
    assert report["summary"]["ratios"]["trimtab"]["best_peer"] == "accelerate"
    assert "| accelerate |" in text
    assert text.partition("\n\n")[2].strip() in path.with_suffix(".md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("work", ["bert-imdb", "instruct-1b-lora"])
def test_all_compute_the_same_loss(work, tmp_path):
    """The first step of the same model on the same rows; up to the order of sums."""
    path = tmp_path / "found.json"
    peers = ["--peers", "accelerate", "torch", "--device", "cpu", "--threads", "1", "--precision", "fp32"]
    run_peers(work, "--small", "--check", *peers, "--out", str(path))
    losses = {name: run["losses"] for name, (run,) in json.loads(path.read_text())["runs"].items()}
    assert len(losses) == 3
    assert {name: of_it[0] for name, of_it in losses.items()} == pytest.approx(
        dict.fromkeys(losses, losses["torch"][0]), rel=1e-5
    )
