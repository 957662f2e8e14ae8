"""What a comparison says: numbers with their spread, a verdict that claims no more than was measured, files."""

import json
import math
import re
from dataclasses import asdict, replace

import pytest

from trimtab.report.anatomy import PARTS, Anatomy
from trimtab.report.compare import GIB, Comparison, Measurement, Outcome, Spread, Variant
from trimtab.report.page.comparison_page import comparison_page
from trimtab.report.tables import anatomy_table, main_table, markdown, notes, write_folder
from trimtab.report.verdict import verdict

ANATOMY = Anatomy(
    weights=2 * GIB,
    gradients=GIB,
    optimizer_state=4 * GIB,
    activations=GIB // 2,
    logits_and_loss=GIB // 4,
    temporaries=GIB // 4,
    allocator_slack=GIB,
    outside=GIB // 2,
)


def run(repeat=0, *, step_s=0.1, peak_gib=8.0, loss=2.0, **changes):
    """Ten timed steps of four rows."""
    plain = Measurement(
        repeat=repeat,
        num_steps=20,
        step_s=(step_s,) * 10,
        num_rows=40,
        num_tokens=400,
        host_peak_bytes=3 * GIB,
        allocated_peak_bytes=int(peak_gib * GIB),
        reserved_peak_bytes=int((peak_gib + 1) * GIB),
        outside_bytes=GIB // 2,
        losses=((10, 3.0), (18, 2.5), (20, loss)),
        metrics={"accuracy": 0.5},
        metric="accuracy",
        anatomy=ANATOMY if repeat == 0 else None,
    )
    return replace(plain, **changes)


def outcome(name, *runs, failure=""):
    return Outcome(Variant(name, {"train.precision": name}), runs, failure)


def comparison(*outcomes, **changes):
    protocol = {"steps": 20, "repeats": 2, "warmup steps": 2, "each run": "a fresh process"}
    surroundings = {"hardware": "a machine", "versions": "torch 2"}
    return Comparison(tuple(outcomes), protocol, surroundings, {"model": "x"}, **changes)


BASE = outcome("fp32", run(0), run(1, step_s=0.11))


# ---------------------------------------------------------------------- numbers


def test_numbers_of_a_run():
    speed = BASE.spread("samples/s")
    assert (speed.high, speed.low, speed.num_runs) == (pytest.approx(40), pytest.approx(40 / 1.1), 2)
    assert BASE.spread("tokens/s").high == pytest.approx(400)
    assert BASE.spread("step ms").median == pytest.approx(105)
    assert BASE.memory.median == 8 * GIB


def test_final_loss_is_that_of_the_last_tenth():
    assert run().final_loss == 2.0
    assert run(losses=((9, 5.0), (19, 4.0), (20, 1.0))).final_loss == 2.5  # one step of each
    assert run(num_steps=100, losses=((91, 8.0), (95, 4.0), (100, 1.0))).final_loss == pytest.approx(2.9)
    assert math.isnan(run(losses=()).final_loss)


def test_the_memory_of_a_process_that_was_recorded_does_not_count():
    found = outcome("a", run(0, host_peak_bytes=9 * GIB), run(1))
    assert found.spread("process").median == 3 * GIB
    assert outcome("a", run(0, host_peak_bytes=9 * GIB)).spread("process").median == 9 * GIB


def test_a_measurement_goes_through_json():
    one = run()
    assert Measurement.from_json(json.loads(json.dumps(asdict(one)))) == replace(
        one, anatomy=replace(ANATOMY, largest=[])
    )


def test_spread():
    assert Spread.of([math.nan]) is None
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert Spread.of([1234.5, 1234.5]).written(1) == "1,234.5"
    assert Spread.of([1.0, 2.0]).written(2) == "1.50 (1.00–2.00)"
    assert Spread(2, 1, 3, 3).is_apart_from(Spread(5, 4, 6, 3))
    assert not Spread(2, 1, 4, 3).is_apart_from(Spread(5, 4, 6, 3))


# ---------------------------------------------------------------------- the verdict


def test_verdict_of_two():
    half = outcome("bf16", run(0, step_s=0.05, peak_gib=5, loss=2.006), run(1, step_s=0.051, peak_gib=5, loss=2.006))
    assert verdict(comparison(BASE, half)) == (
        "bf16 needs 38% less memory than fp32, is 2.1 × as fast, and its loss after 20 steps is 0.3% higher."
    )


def test_no_difference_is_claimed_inside_the_spread():
    """Both medians differ by 5%, but the runs of one lie among those of the other."""
    other = outcome("bf16", run(0, step_s=0.104), run(1, step_s=0.096))
    assert verdict(comparison(BASE, other)) == (
        "bf16 needs as much memory as fp32, is as fast within the spread, and has the same loss after 20 steps."
    )
    noisy = outcome("bf16", run(0, loss=1.9), run(1, loss=2.2))
    assert "its loss after 20 steps is the same within the spread" in verdict(comparison(BASE, noisy))


def test_verdict_of_one_run_each_says_so():
    one, other = outcome("fp32", run()), outcome("bf16", run(step_s=0.05))
    assert "the spread is unknown" in verdict(comparison(one, other))
    assert "not known" not in verdict(comparison(BASE, BASE))


def test_verdict_of_many_names_the_smallest_and_the_fastest():
    small = outcome("small", run(0, peak_gib=2, step_s=0.3), run(1, peak_gib=2, step_s=0.3))
    fast = outcome("fast", run(0, step_s=0.02), run(1, step_s=0.02))
    other = outcome("other", run(0), run(1))
    said = verdict(comparison(BASE, other, fast, small, outcome("broken", failure="out of memory")))
    assert said.startswith("small needs 75% less memory than fp32, is 65% slower, and has the same loss")
    assert "; fast needs as much memory as fp32, is 5.2 × as fast" in said
    assert "other" not in said
    assert said.endswith("broken did not run.")


def test_verdict_of_nothing():
    failed = outcome("fp32", failure="out of memory")
    assert verdict(comparison(failed)) == "no variant ran."
    assert verdict(comparison(failed, BASE)) == "only fp32 ran: nothing to compare; fp32 did not run."


# ---------------------------------------------------------------------- tables and files


def test_tables_have_a_row_for_what_failed():
    failed = outcome("tf32", failure="refused: | no such thing")
    header, rows = main_table(comparison(BASE, failed))
    assert header == [
        *("variant", "samples/s", "tokens/s", "step ms", "peak GiB", "reserved GiB", "host GiB", "loss"),
        "eval accuracy",
    ]
    assert rows[0][:2] == ["fp32", "38.2 (36.4–40.0)"]
    assert rows[0][4:] == ["8.00", "9.00", "3.00", "2.0000", "0.5000"]
    assert rows[1] == ["tf32", "failed", *[""] * 7]
    page = markdown(comparison(BASE, failed), "A | title")
    assert "tf32: refused: | no such thing" in page
    assert page.count("\n| ") == 4 + 3


def test_a_reason_is_told_below_the_table():
    long = outcome("tf32", failure="word " * 40)
    assert notes(comparison(BASE, long))[1] == f"tf32: {'word ' * 40}"
    later = outcome("bf16", run(), failure="out of memory")
    assert main_table(comparison(later))[1][0][0] == "bf16 (after 1: out of memory)"


def test_anatomy_adds_up():
    header, rows = anatomy_table(comparison(BASE))
    assert header == ["at the peak, GiB", *PARTS, "sum"]
    assert rows == [["fp32", "2.00", "1.00", "4.00", "0.50", "0.25", "0.25", "1.00", "0.50", "9.50"]]


def test_a_step_that_did_not_reach_the_peak_is_said():
    short = outcome("a", run(0, peak_gib=10))
    assert any("reached 80% of the peak" in note for note in notes(comparison(short)))
    assert not any("of the peak" in note for note in notes(comparison(BASE)))


def test_files(tmp_path):
    odd = outcome("nan", run(0, losses=((20, math.nan),), metrics={}))
    found = comparison(BASE, odd, outcome("tf32", failure="no"), is_complete=False)
    files = write_folder(found, tmp_path, "A title")
    names = ["results.json", "report.html", "results.md", "memory-and-speed.png", "loss.png"]
    assert [file.name for file in files] == names
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in files[3:])
    stored = json.loads(files[0].read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert stored["variants"][0]["numbers"]["samples/s"]["num_runs"] == 2
    assert stored["variants"][0]["runs"][0]["anatomy"]["weights"] == 2 * GIB
    assert stored["variants"][1]["runs"][0]["losses"] == [[20, None]]
    assert stored["variants"][2]["failure"] == "no"
    assert (stored["is_complete"], stored["recipe"]) == (False, {"model": "x"})
    page = files[2].read_text()
    assert page.startswith("# A title\n\n")
    assert "Stopped before all runs were done." in page
    assert "![loss](loss.png)" in page


def test_nothing_to_draw(tmp_path):
    files = write_folder(comparison(outcome("fp32", failure="no")), tmp_path, "A title")
    assert [file.name for file in files] == ["results.json", "report.html", "results.md"]


def test_a_comparison_as_a_page():
    other = outcome("bf16 <b>", run(0, peak_gib=4.0, losses=((10, math.nan), (20, 1.5))))
    failed = outcome("fp8", failure="no <such> device")
    page = comparison_page(comparison(BASE, other, failed, is_complete=False), "Variants of x & y.yaml")
    assert "Variants of x &amp; y.yaml" in page
    assert "bf16 &lt;b&gt; needs 50% less memory than fp32" in page
    assert "no &lt;such&gt; device" in page
    assert '<span class="state stopped">' in page
    for title in ("Results", "Memory at the peak of a step", "Speed", "Curves", "Variants", "Environment", "Recipe"):
        assert f"<h2>{title}</h2>" in page
    assert '"name":"bf16 \\u003cb>","color":1,"points":[[10,null],[20,1.5]]' in page
    assert page.count('title="optimizer state: 4.0 GiB"') == 2
    assert "<b>" not in page
    assert re.findall(r"<dt>(.*?)</dt><dd>(.*?)<small>", page)[1] == ("least memory", "bf16 &lt;b&gt;")
    nothing = comparison_page(comparison(outcome("fp32", failure="x")), "nothing ran")
    assert "no variant ran" in nothing
