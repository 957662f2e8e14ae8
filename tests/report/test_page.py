"""The parts of a report: what a page refers to, escaping, curves, and the values of a recipe with their origins."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from trimtab.recipe.load import LoadedRecipe, render_resolved_yaml
from trimtab.recipe.schema import Recipe
from trimtab.report.page.charts import thin_out, training_charts
from trimtab.report.page.data_section import data_card
from trimtab.report.page.document import document, escape, number, section, table
from trimtab.report.page.held_out_section import held_out_rows, samples_section
from trimtab.report.page.plan_section import comparison_with_prediction, plan_section
from trimtab.report.page.run_files import RunFiles, read_recipe
from trimtab.report.page.run_page import run_page, run_tiles
from trimtab.report.page.usage import usage_section

EVIL = "</script><script>alert(1)</script> & \"quotes\" 'too' \x00\ud800"


class Tags(HTMLParser):
    """The elements of a page: tag and attributes, and the text inside scripts."""

    def __init__(self, text):
        super().__init__()
        self.found, self.scripts, self._open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass


def outside_references(page):
    """Everything in a page that a browser would fetch from elsewhere."""
    found = [
        value
        for _, attributes in Tags(page).found
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "action", "data", "poster") and not value.startswith(("#", "data:"))
    ]
    return found + re.findall(r"@import[^;]*|url\((?!#)[^)]*\)|https?://\S+", page)


def data_of(page):
    text = next(script for script in Tags(page).scripts if script.startswith('{"charts"'))
    return {one["id"]: one for one in json.loads(text)["charts"]}


def test_a_page_refers_to_nothing_outside():
    page = document("a title", section("x", "X", table(["a", "b"], [["1", "2"]])), training_charts([("", CURVES)]))
    assert outside_references(page) == []
    assert outside_references(page.replace("<main>", '<main><img src="a.png">')) == ["a.png"]
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page
    assert '<meta name="viewport"' in page


def test_everything_from_users_is_escaped():
    curves = {EVIL: [(1, 0.5)], "loss": [(1, 2.0)]}
    found = {"step": 1, "num_rows": 1, "labels": [EVIL, "b"], "confusion": [[1, 0], [0, 0]]}
    found["worst"] = [{"loss": 1.0, "label": EVIL, "predicted": "b", "text": EVIL, "location": EVIL}]
    body = section("x", EVIL, table([EVIL, EVIL], [[EVIL, EVIL]]), held_out_rows(found))
    page = document(EVIL, body, training_charts([(EVIL, curves), ("other", curves)]))
    page.encode()  # no half of a surrogate pair is left
    assert "alert(1)</script>" not in page
    assert len(Tags(page).scripts) == 2
    assert data_of(page)[EVIL]["series"][0]["name"] == EVIL
    assert escape("<a b='c'>\x07") == "&lt;a b=&#x27;c&#x27;&gt;\ufffd"


CURVES = {
    "loss": [(1, 2.0), (2, None), (3, 1.0)],
    "eval_loss": [(3, 1.5)],
    "eval_accuracy": [(3, 0.5)],
    "eval_f1": [(3, 0.4)],
    "eval_perplexity": [(3, 9.0)],
    "lr": [(1, 1e-3)],
    "grad_norm": [(1, 1.0), (2, 100.0)],
    "tokens_per_s": [(1, 10)],
    "memory_bytes": [(1, 2**30)],
    "epoch": [(1, 0.1)],
    "my_value": [(1, 7)],
}


def test_charts_of_a_run_and_of_several():
    charts = {one["id"]: one for one in training_charts([("", CURVES)], [("budget", 2**31)])}
    assert list(charts) == [
        *("loss", "metrics", "eval_perplexity", "lr", "grad_norm", "tokens_per_s", "memory_bytes", "my_value"),
    ]
    assert [series["name"] for series in charts["loss"]["series"]] == ["training", "held-out"]
    assert charts["loss"]["series"][0]["points"] == [(1, 2.0), (2, None), (3, 1.0)]
    assert charts["grad_norm"]["log"]
    assert charts["memory_bytes"]["marks"] == [{"label": "budget", "value": 2**31}]
    errors = {"eval_mae": [(3, 0.2)], "eval_pearson": [(3, 0.5)], "eval_spearman": [(3, 0.4)]}
    assert [one["id"] for one in training_charts([("", errors)])] == ["metrics", "eval_mae"]  # an error is not a share
    several = {one["id"]: one for one in training_charts([("a", CURVES), ("b", {"loss": [(1, float("nan"))]})])}
    assert [series["name"] for series in several["loss"]["series"]] == ["a", "b"]
    assert several["loss"]["series"][1]["points"] == [(1, None)]
    assert [series["name"] for series in several["eval_accuracy"]["series"]] == ["a"]


def test_long_curves_keep_their_spikes_and_gaps():
    points = [(step, float(step % 7)) for step in range(100_000)]
    points[54_321] = (54_321, 1e9)
    points[77_777] = (77_777, None)
    kept = thin_out(points)
    assert len(kept) <= 1600
    assert set(kept) <= set(points)
    assert {points[0], points[54_321], points[77_777], points[-1]} <= set(kept)
    assert [step for step, _ in kept] == sorted(step for step, _ in kept)
    assert thin_out(points[:10]) == points[:10]


@pytest.mark.parametrize("path", ["y.csv", "a  # b.csv", "it's # here: x.csv", 'a "quoted" # one.csv'])
def test_origins_are_read_from_a_recipe(tmp_path, path):
    loaded = LoadedRecipe(Recipe(model="x", data={"train": path}, train={"lr": 1e-3}), {"train.lr": "r # s.yaml:3"})
    (tmp_path / "recipe.yaml").write_text(render_resolved_yaml(loaded))
    found = {value.key: value for value in read_recipe(tmp_path / "recipe.yaml")}
    assert path in (found["data.train"].value, found["data.train"].value[1:-1].replace("''", "'").replace('\\"', '"'))
    assert found["data.train"].origin == "Python"
    assert (found["train.lr"].value, found["train.lr"].origin) == ("0.001", "r # s.yaml:3")
    assert found["memory.budget"].origin == "default"
    assert read_recipe(tmp_path / "nowhere.yaml") == ()


def test_a_card_without_labels_and_held_out_rows():
    sizes = {"num_rows": 4, "num_examples": 2, "num_truncated": 1, "num_tokens": 9, "num_loss_tokens": 5}
    sizes |= {"shortest": 1, "median": 2, "p95": 3, "longest": 8}
    card = {
        "task": "chat",
        "notices": ["not <used>"],
        "columns": {"prompt": ["a", "b"]},
        "train": sizes,
        "eval": None,
        "max_length": 8,
    }
    text = data_card(card | {"histogram": [{"first": 1, "last": 8, "num_examples": 2}], "labels": []})
    assert "a and b (prompt)" in text
    assert "1 (25.0%)" in text
    assert "not &lt;used&gt;" in text
    assert "Labels" not in text
    assert data_card({}) == held_out_rows({}) == ""


def diagonal(labels):
    """Every label confused once with the next one, and right three times."""
    num = len(labels)
    counts = [[3 * (row == column) + (column == (row + 1) % num) for column in range(num)] for row in range(num)]
    return {"step": 7, "num_rows": 4 * num, "labels": labels, "confusion": counts}


def test_a_matrix_of_few_labels_has_counts():
    text = text_of(held_out_rows(diagonal(["good", "bad"])))
    assert "8 held-out rows: 6 correct, 2 wrong (75.0% accuracy)" in text
    assert "predicted → good bad good 3 1 bad 1 3" in text
    long = "a label that is too long for the head of a column"
    assert f"predicted → 1 2 1. {long} 3 1 2. bad 1 3" in text_of(held_out_rows(diagonal([long, "bad"])))


def test_a_matrix_of_many_labels_is_a_heat_map():
    labels = [f"label <{number}>" for number in range(77)]
    page = held_out_rows(diagonal(labels))
    assert page.count("<title>") == 2 * 77
    assert "<title>true label &lt;5&gt;, predicted label &lt;6&gt;: 1 of 4</title>" in page
    text = text_of(page)
    assert "Most frequent confusions true predicted rows label &lt;0&gt; label &lt;1&gt; 1" in text
    assert "Scores of all 77 labels, the lowest F1 first" in text


def test_values_that_are_not_finite_are_dashes():
    assert [number(value) for value in (None, float("nan"), "nan", "Infinity", 0.25)] == ["–", "–", "–", "–", "0.2500"]
    row = {"loss": None, "label": "a", "predicted": "b", "text": "c", "location": "d:1"}
    assert 'data-title="loss">–</td>' in held_out_rows({"step": 1, "num_rows": 1, "worst": [row]})


def test_large_figures_have_no_exponents(tmp_path):
    status = {"step": 1000, "num_steps": 2000, "best_metric": 0.5, "metric_name": "f1", "best_step": None}
    plan = {"steps_per_epoch": 8, "num_trainable": 999_600_000, "num_parameters": 1_500 * 10**9}
    found = {
        name: (value, remark) for name, value, remark in run_tiles(RunFiles(tmp_path, status, "stopped", "", plan))
    }
    assert found["Steps"] == ("1,000", "of 2,000, 125 epochs")
    one = dict((name, remark) for name, _, remark in run_tiles(RunFiles(tmp_path, status | {"step": 8}, "", "", plan)))
    assert one["Steps"] == "of 2,000, 1 epoch"
    assert found["Trainable"] == ("1,000 M", "of 1,500 B parameters")
    assert found["Best held-out f1"] == ("0.5000", "at step –")


def run_in_node(expression):
    """Evaluate JavaScript with the functions of the page that write numbers and ticks."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node, which runs the script of the page")
    script = files("trimtab.report.page").joinpath("page.js").read_text(encoding="utf-8")
    functions = script[script.index("function shortly") : script.index("// ------", script.index("function logTicks"))]
    code = f"{functions} console.log(JSON.stringify({expression}))"
    return json.loads(subprocess.run([node, "-e", code], capture_output=True, text=True, timeout=60, check=True).stdout)


@pytest.mark.parametrize("bounds", [(0.3, 0.30000000000000004), (0.3, 0.4), (1000.0, 1000.0000000000001), (0, 9e15)])
def test_the_ticks_of_every_range_end(bounds):
    assert len(run_in_node(f"linearTicks({bounds[0]}, {bounds[1]}, 5)")) <= 11


def test_a_run_in_progress_tells_the_time_left_and_is_not_to_be_resumed(tmp_path):
    status, curves = {"step": 10, "num_steps": 70}, {"time": [(step, 2.0 * step) for step in range(1, 11)]}
    card = {"task": "classify"}
    for state, left, is_resumed in (("running", ", about 2 min left", False), ("killed", "", True)):
        run = RunFiles(tmp_path, status, state, "", curves=curves, card=card)
        assert ("Steps", "10", f"of 70{left}") in run_tiles(run)
        assert ("trimtab resume" in usage_section(run)) == is_resumed


def test_a_page_of_a_model_that_generates_names_the_command_for_samples(tmp_path):
    for task, is_named in (("chat", True), ("classify", False)):
        run = RunFiles(tmp_path, {"step": 1}, "finished", "", card={"task": task})
        assert ("--samples 3" in text_of(run_page(run))) == is_named


def test_samples_are_escaped_and_an_empty_one_is_named():
    row = {"prompt": "<b>", "before": None, "after": " ", "expected": "good"}
    page = samples_section({"note": "a note", "rows": [row]})
    assert text_of(page) == "a note Prompt &lt;b&gt; After training (no text) In the data good"


def test_the_rest_of_a_processs_memory_is_explained(tmp_path):
    plan = PLAN | {"device": "cpu", "predicted_total_bytes": 5 * 2**30}
    text = text_of(comparison_with_prediction(RunFiles(tmp_path, {"step": 1}, "finished", "", plan=plan)))
    assert "The other 1.0 GiB are Python, PyTorch and other libraries." in text
    none = RunFiles(tmp_path, {"step": 1, "train_seconds": 2.0}, "finished", "", plan={"device": "cpu"})
    assert text_of(comparison_with_prediction(none)).endswith("measured time of an optimizer step 2.00 s")


@pytest.mark.parametrize(
    ("ticks", "texts"),
    [
        ("linearTicks(0.6928, 0.6931, 3)", ["0.6928", "0.6929", "0.6930", "0.6931"]),  # a narrow range: no equal texts
        ("linearTicks(0, 1e-3, 5)", ["0", "2e-4", "4e-4", "6e-4", "8e-4", "1e-3"]),
        ("linearTicks(0, 1e30, 2)", ["0", "5e29", "1e30"]),
        ("linearTicks(10000, 10002, 2)", ["10k", "10.001k", "10.002k"]),
        ("linearTicks(0, 2e9, 2)", ["0", "1G", "2G"]),
        ("logTicks(0.1, 100)", ["0.1", "1", "10", "100"]),
        ("logTicks(1.25, 1.31)", ["1.25", "1.26", "1.27", "1.28", "1.29", "1.30", "1.31"]),  # no power of ten in it
    ],
)
def test_the_texts_of_ticks_differ(ticks, texts):
    assert [text for _, text in run_in_node(ticks)] == texts


PLAN = {
    "device": "cuda:0",
    "origin": "predicted",
    "budget_bytes": 8 * 2**30,
    "predicted_peak_bytes": 4 * 2**30,
    "predicted_total_bytes": 5 * 2**30,
    "predicted_step_s": 0.5,
    "predicted_parts": {"weights": 3 * 2**30, "activations": 2**30},
    "predicted_eval_peak_bytes": 2**30,
    "why": "Chosen: micro-batch 4: the fastest that fits.",
}


def text_of(page):
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


def test_predictions_for_a_gpu_stand_beside_measurements(tmp_path):
    status = {"step": 10, "train_seconds": 6.0, "peak_memory_bytes": int(4.2 * 2**30)}
    curves = {"peak_reserved_bytes": [(10, 5 * 2**30)], "preflight_eval_peak_bytes": [(10, 2**30)]}
    run = RunFiles(tmp_path, status, "finished", "", plan=PLAN, curves=curves)
    text = text_of(comparison_with_prediction(run))
    assert "peak of allocated memory 4.0 GiB 4.2 GiB +5.0%" in text
    assert "peak of reserved memory – 5.0 GiB –" in text
    assert "peak of evaluations 1.0 GiB 1.0 GiB +0.0%" in text
    assert "device memory needed 5.0 GiB – –" in text
    assert "time of an optimizer step 500.0 ms 600.0 ms +20.0%" in text
    assert "memory budget 8.0 GiB" in text
    assert "activations 1.0 GiB" in text
    assert PLAN["why"] in plan_section(run)


def test_a_plan_that_was_measured_lists_its_trials(tmp_path):
    trials = [
        {"micro_batch": 8, "num_tokens": 512, "total_bytes": None, "fits": False},
        {"micro_batch": 4, "num_tokens": 256, "loss": "chunked", "total_bytes": 2**30, "fits": True},
    ]
    plan = {"device": "cuda:0", "origin": "measured", "measured_peak_bytes": 2**30, "measured_steps": trials}
    run = RunFiles(tmp_path, {"step": 1, "peak_memory_bytes": 2**30}, "finished", "", plan=plan)
    text = text_of(plan_section(run))
    assert "trial steps on the device were measured" in text
    assert "8 – out of memory no" in text
    assert "4 loss: chunked 1.0 GiB yes" in text
    text = text_of(comparison_with_prediction(run))
    assert "trial steps measured difference peak of allocated memory 1.0 GiB 1.0 GiB +0.0%" in text
