"""Pages in a real browser: hover, zoom, log scale, legend and arrow keys."""

import html
import json
import re
import shutil
import subprocess

import pytest

from trimtab.report.memory_page import MemoryPage, render_memory_page
from trimtab.report.page.charts import places, training_charts
from trimtab.report.page.document import document
from trimtab.report.step_record import Allocation, StepRecord

BROWSER = next(filter(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome")), None)
CURVES = {
    "loss": [(step, 2.0 / step) for step in range(1, 101)],
    "eval_loss": [(step, 1.5 / step) for step in range(10, 101, 10)],
    "lr": [(step, 1e-4 * (100 - step)) for step in range(1, 101)],
    "eval_perplexity": [(100, 7.25)],
}
# What a reader does, and what the page shows after it.
ACTIONS = """
const found = { errors: [] };
addEventListener("error", (event) => found.errors.push(event.message));
const figure = () => document.querySelector("figure[data-chart]"), svg = () => figure().querySelector("svg");
const at = (share, type, more) => {
  const box = svg().getBoundingClientRect();
  const place = { clientX: box.left + share * box.width, clientY: box.top + 60, bubbles: true, pointerType: "mouse" };
  svg().dispatchEvent(new PointerEvent(type, { ...place, button: 0, ...more }));
};
const steps = () => [...svg().querySelectorAll("text[text-anchor=middle]")].map((text) => Number(text.textContent));
const key = (name) => svg().dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true }));
found.steps = steps();
at(0.5, "pointermove");
found.tip = figure().querySelector(".tip").hidden ? null : figure().querySelector(".tip").innerText;
key("ArrowRight");
found.tipAfterKey = figure().querySelector(".tip").innerText;
figure().querySelector("[data-log]").click();
found.isLog = figure().querySelector("[data-log]").getAttribute("aria-pressed");
found.logTicks = [...svg().querySelectorAll("text[text-anchor=end]")].map((text) => text.textContent);
at(0.4, "pointerdown"); at(0.5, "pointermove"); at(0.6, "pointermove"); at(0.6, "pointerup");
found.zoomed = steps();
svg().dispatchEvent(new MouseEvent("dblclick", { bubbles: true }));
found.again = steps();
found.curves = svg().querySelectorAll("path.curve").length;
figure().querySelector("[data-series]").click();
found.curvesAfterClick = svg().querySelectorAll("path.curve").length;
figure().querySelector("[data-series]").click();
svg().focus();
key("+");
found.zoomedByKey = steps();
found.hasFocus = document.activeElement === svg();
key("Escape");
found.afterEscape = steps();
found.spoken = svg().getAttribute("aria-label");
const rate = [...document.querySelectorAll("figure[data-chart]")].find((each) => each.dataset.chart === "lr");
rate.querySelector("[data-log]").click();
found.rate = rate.querySelector("figcaption").innerText;
found.single = document.querySelector("figure[data-chart=eval_perplexity] svg .over-lines").textContent;
const result = document.createElement("pre");
result.id = "result";
result.textContent = JSON.stringify(found);
document.body.append(result);
"""


def shown_after(page, actions, tmp_path):
    """What a page shows after some actions."""
    path = tmp_path / "report.html"
    path.write_text(page.replace("</body>", f"<script>{actions}</script></body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [*command, "--window-size=1000,2000", "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=300
    )
    return json.loads(html.unescape(re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)[1]))


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")
def test_what_a_reader_does_with_a_chart(tmp_path):
    charts = training_charts([("", CURVES)])
    page = document("a run", places(charts), charts)
    found = shown_after(page, ACTIONS, tmp_path)
    assert found["errors"] == []
    assert (min(found["steps"]), max(found["steps"])) == (20, 100)
    assert 40 <= int(re.match(r"step (\d+)\ntraining", found["tip"])[1]) <= 60
    assert found["tipAfterKey"] != found["tip"]
    assert found["isLog"] == "true"
    assert {"0.1", "1"} <= set(found["logTicks"])
    assert 35 <= min(found["zoomed"]) <= max(found["zoomed"]) <= 65
    assert found["again"] == found["steps"]
    assert (found["curves"], found["curvesAfterClick"]) == (2, 1)
    assert len(found["zoomedByKey"]) > 1
    assert max(found["zoomedByKey"]) - min(found["zoomedByKey"]) < 60
    assert found["hasFocus"]
    assert found["afterEscape"] == found["steps"]
    assert found["spoken"].startswith(
        "Loss by step. training: from 2 at step 1 to 0.02 at step 100, between 0.02 and 2."
    )
    assert "values ≤ 0 are not drawn" in found["rate"]
    assert found["single"] == "7.25"


LOOK_AT_A_STAGE = """
const found = {};
const stages = [...document.querySelectorAll(".stages button")];
const visible = () => stages.filter((stage) => !stage.hidden).map((stage) => stage.title.split(":")[0]);
const times = () => [...document.querySelectorAll(".times span")].map((text) => text.textContent);
found.whole = [visible(), times()];
stages[1].click();
found.alone = [visible(), times()];
stages[1].click();
found.again = [visible(), times()];
const result = document.createElement("pre");
result.id = "result";
result.textContent = JSON.stringify(found);
document.body.append(result);
"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")
def test_a_stage_of_a_memory_page_alone(tmp_path):
    allocations = (Allocation(2**20, "weights", "w"), Allocation(2**20, "activations", "a", "mm", 0, 2))
    stages = (("forward", 0), ("backward", 1), ("optimizer", 3))
    record = StepRecord("predicted", "t4", allocations, times=(1.0, 2.0, 3.0, 4.0), stages=stages)
    found = shown_after(render_memory_page(MemoryPage("A step", [record])), LOOK_AT_A_STAGE, tmp_path)
    assert found["whole"] == [["forward", "backward", "optimizer"], ["0", "1.00 s", "2.00 s", "3.00 s", "4.00 s"]]
    assert found["alone"] == [["backward"], ["1.00 s", "1.50 s", "2.00 s", "2.50 s", "3.00 s"]]
    assert found["again"] == found["whole"]
