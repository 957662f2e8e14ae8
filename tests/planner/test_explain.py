"""The words of a ladder: plans, bars, the sentence about the choice, and what is said where nothing fits."""

from dataclasses import replace

import pytest

from trimtab.planner.explain import Change, Rung, bar, cannot_fit, legend, reason, rung, shown, table, words_of
from trimtab.planner.search import Estimate, Row
from trimtab.techniques.apply import plain_spec

GIB = 2**30
PLAIN = plain_spec(1, "bf16")
PARTS = {"weights": 2 * GIB, "activations": 5 * GIB, "outside the allocator": GIB}


def make(rows, total_gib, tokens_s, *, fits=True, chosen=False, recomputed="none", alternative=False):
    parts = {"weights": GIB, "activations": int((total_gib - 1) * GIB)}
    adapter = "lora" if alternative else "none"
    spec = plain_spec(rows, "bf16", gradient_checkpointing=recomputed, adapter=adapter)
    return Rung(spec, parts, tokens_s, 1.0, None, fits, chosen, alternative)


def test_words():
    plain = plain_spec(4, "bf16")
    assert words_of(plain, plain) == "micro-batch 4"
    spec = plain.having({"gradient_checkpointing": "all", "loss": "chunked"})
    assert words_of(spec, plain) == "micro-batch 4, recompute all, loss chunked"
    spec = plain.having({"gradient_checkpointing": "{every: 2}", "attention_backend": "flash"})
    assert words_of(spec.with_micro_batch(1), spec) == "micro-batch 1, recompute every 2nd"
    assert words_of(spec, plain) == "micro-batch 4, recompute every 2nd, attention flash"
    spec = plain.having({"optimizer": "adamw8bit", "offload": "embeddings", "adapter": "qlora"})
    assert words_of(spec, plain) == "QLoRA, micro-batch 4, adamw8bit, embeddings on host"


def test_a_row_gets_slack_and_what_is_outside():
    row = Row(plain_spec(1, "bf16"), Estimate(True, 700, 50, {"weights": 300, "activations": 400}, 2.0, 10.0))
    found = rung(row, needed_bytes=720, num_steps=30)
    assert found.total_bytes == 720 + 50
    assert found.parts["allocator slack"] == 20
    assert found.run_s == 60


@pytest.mark.parametrize(("columns", "width"), [(200, 32), (80, 20)])
def test_bars_show_the_parts_and_the_budget(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", str(columns))
    drawn = bar(PARTS, budget_bytes=4 * GIB, whole_bytes=8 * GIB)
    assert len(drawn) == width + 1
    assert drawn.index("|") == width // 2
    letters = drawn.replace("|", "")
    assert [letters.count(letter) for letter in "wax"] == [width // 4, width * 5 // 8 + width % 8 // 4, width // 8]
    assert bar(PARTS, budget_bytes=100 * GIB, whole_bytes=8 * GIB).count("|") == 0


def test_a_cell_of_several_parts_has_the_letter_of_the_largest(monkeypatch):
    """Weights of LoRA on fp8 are less than half a cell, and the gradients next to them a hundredth."""
    monkeypatch.setenv("COLUMNS", "80")
    parts = {"weights": int(1.45 * GIB), "gradients": GIB // 10, "activations": 12 * GIB}
    assert bar(parts, budget_bytes=60 * GIB, whole_bytes=60 * GIB).startswith("waaaa·")


def test_the_table_marks_what_was_chosen_and_what_is_too_large():
    rungs = [make(8, 20, 300, fits=False), make(4, 10, 250, chosen=True)]
    header, rows = table(rungs, 12 * GIB, PLAIN)
    assert [len(row) for row in rows] == [len(header)] * 2
    assert [row[0] for row in rows] == ["", "→"]
    assert header[1] == "GiB"
    assert [row[1] for row in rows] == ["20.00", "10.00"]
    assert [row[3] for row in rows] == ["too large", ""]
    assert [row[-1] for row in rows] == ["micro-batch 8", "micro-batch 4"]
    on_host = replace(make(2, 9, 400, fits=False), excess_host_bytes=295 * GIB)
    assert table([on_host], 12 * GIB, PLAIN)[1][0][3] == "needs 295.0 GiB on the host"
    assert "run" not in header
    assert "run" in table([replace(one, run_s=90.0) for one in rungs], 12 * GIB, PLAIN)[0]
    assert legend(rungs) == "w weights  a activations"


def test_the_reason():
    chosen = make(4, 10, 250, chosen=True)
    assert reason([chosen, make(1, 5, 100)], 12 * GIB, PLAIN) == (
        "Chosen: micro-batch 4: the fastest of all, and it fits (10.00 GiB of 12.00 GiB)."
    )
    faster = make(8, 20, 300, fits=False)
    assert "micro-batch 8 would be 20% faster and needs 20.00 GiB" in reason([faster, chosen], 12 * GIB, PLAIN)
    on_host = replace(make(8, 9, 300, fits=False), excess_host_bytes=295 * GIB)
    assert "micro-batch 8 would be 20% faster and needs 295.0 GiB on the host" in reason([on_host, chosen], GIB, PLAIN)
    nearly = make(8, 15, 251, fits=False)
    assert "micro-batch 8 would be 20% faster" in reason([nearly, faster, chosen], 12 * GIB, PLAIN), "not 0%"
    other = make(8, 20, 900, fits=False, alternative=True)
    assert "fastest of all" in reason([chosen, other], 12 * GIB, PLAIN), "another method is no faster plan of this one"


def test_at_most_a_dozen_rows():
    rungs = [make(32 - n, 32 - n, 1000 - n, fits=n > 9, chosen=n == 10) for n in range(25)]
    kept = shown([*rungs, make(4, 3, 500, alternative=True)])
    assert len(kept) == 12
    assert rungs[0] in kept
    assert rungs[10] in kept
    assert rungs[24] in kept
    assert kept[-1].is_alternative
    assert shown(rungs[:12]) == rungs[:12]


def test_what_is_said_where_nothing_fits():
    smallest = make(1, 6, 100, fits=False, recomputed="all")
    changes = [
        Change("data.max_length: 256", 3 * GIB, True),
        Change("memory.allow: [8bit]", 5 * GIB, False),
        Change("adapter: lora", 2 * GIB, True),
        Change("adapter: qlora", GIB, True),
    ]
    said = cannot_fit(smallest, "t4", 4 * GIB, changes, PLAIN).splitlines()
    assert said[0] == (
        "does not fit: needs 6.00 GiB, 2.00 GiB over the budget of 4.00 GiB (t4), "
        "with the smallest plan (micro-batch 1, recompute all)"
    )
    assert [line.strip() for line in said[1:]] == [
        "would fit with:",
        "data.max_length: 256: 3.00 GiB",
        "adapter: lora: 2.00 GiB",
        "adapter: qlora: 1.00 GiB",
    ]
    said = cannot_fit(smallest, "t4", 4 * GIB, changes[1:2], PLAIN)
    assert "still too large with:\n    memory.allow: [8bit]: 5.00 GiB" in said
    assert "would fit" not in said
    said = cannot_fit(smallest, "t4", 6 * GIB, [], PLAIN)
    assert said.startswith("does not fit: needs 6.00 GiB, which leaves no reserve in the budget of 6.00 GiB (t4), with")
    on_host = replace(smallest, excess_host_bytes=80 * GIB)
    changes = [Change("memory.allow: [8bit]", 6 * GIB, False, 70 * GIB)]
    said = cannot_fit(on_host, "t4", 8 * GIB, changes, PLAIN, "64.0 GiB (assumed; set --host-memory)")
    words = "and 80.00 GiB of host memory, over the budget of 64.0 GiB (assumed; set --host-memory), with"
    assert said.startswith(f"does not fit: needs 6.00 GiB, {words}")
    assert said.endswith("still too large with:\n    memory.allow: [8bit]: 6.00 GiB, 70.00 GiB on the host")
