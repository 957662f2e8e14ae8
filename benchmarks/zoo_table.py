"""Results of the zoo: lines of JSON, and the page that is made of them, docs/models.md."""

import json
from collections import Counter
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- made by benchmarks/zoo_train.py --page: begin -->", "<!-- end -->"
COLUMNS = {  # variant: head of its column
    "fit": "fit",
    "config": "from config",
    "resume": "resume",
    "recompute": "recompute",
    "chunked": "chunked loss",
    "packed": "no padding",
    "lora": "LoRA",
}
NO_LOGITS = "classify"  # a task whose loss has few logits, so that the chunked loss does not exist
_MAX_REASON = 260


def read_results(path):
    """The last line of each pair, by (model, task)."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines()) if path.exists() else []
    return {(line["model"], line["task"]): line for line in lines}


def append_results(path, line):
    """Add a line; several processes may do so at once."""
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def compact_results(path, pairs):
    """One line for each of these pairs, in their order; a pair that was never tried has no results in its line."""
    found = read_results(path)
    lines = [found.get((model, task), {"model": model, "task": task, "found": {}}) for model, task in pairs]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def write_page(results, page=PAGE):
    """Replace what is between the marks of the page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n\n{render(read_results(results))}\n{END}{after}", encoding="utf-8")


def render(results):
    """Counts, a table for each task, the reasons, and the pairs that transformers does not train."""
    lines = list(results.values())
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    reasons = Reasons()
    parts = [_versions(lines), _counts(lines, tasks)]
    parts += [_matrix(task, [line for line in lines if line["task"] == task], reasons) for task in tasks]
    parts += ["## Killed and resumed", _killed(lines, reasons), "## Reasons", reasons.text()]
    parts += ["## Pairs that transformers does not train", _apart(lines)]
    return "\n\n".join(parts) + "\n"


class Reasons:
    """Numbers reasons in the order in which they come; equal ones have one number."""

    def __init__(self):
        self._numbers = {}

    def number(self, text):
        return self._numbers.setdefault(text, len(self._numbers) + 1)

    def text(self):
        return "\n".join(f"{number}. {reason}" for reason, number in self._numbers.items()) or "None."


def state_of(line, variant):
    """ "ok", "fallback", "refused", "failed", "not run" or "none" (the task has no such variant), and the reason."""
    if variant == "chunked" and line["task"] == NO_LOGITS:
        return "none", ""
    state, *reason = line["found"].get(variant, ["not run"])
    return state, _reason(line["model"], *reason)


def _reason(model, text=""):
    """On one line, without the name of the model, so that the same reason has the same words."""
    text = " ".join(text.split()).replace("|", "/").replace("<", "‹").replace(">", "›").replace("`", "'")
    text = text.replace(f"{model} models", "these models")
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]} …"


def _cell(line, variant, reasons):
    state, reason = state_of(line, variant)
    words = {"ok": "✓", "none": "–", "not run": "not run", "fallback": "fallback", "refused": "✗", "failed": "✗"}[state]
    return f"{words} {reasons.number(reason)}" if reason else words


def _matrix(task, lines, reasons):
    head = ["model", *COLUMNS.values()]
    table = [f"## {task}", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for line in lines:
        if is_apart(line):
            continue
        table.append(f"| {line['model']} | {' | '.join(_cell(line, variant, reasons) for variant in COLUMNS)} |")
    return "\n".join(table)


def _killed(lines, reasons):
    """The pairs that were killed, one a line."""
    killed = [line for line in lines if "kill" in line["found"]]
    items = [f"- {line['model']}, {line['task']}: {_cell(line, 'kill', reasons)}" for line in killed]
    return "\n".join(items) or "None."


def is_apart(line):
    """Whether transformers itself does not train the pair."""
    return line["found"].get("plain", ["ok"])[0] != "ok"


def _counts(lines, tasks):
    head = ["task", "registered", "trained by transformers", *COLUMNS.values()]
    table = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for task in [*tasks, "all"]:
        of_task = [line for line in lines if task in (line["task"], "all")]
        trained = [line for line in of_task if line["found"].get("plain") == ["ok"]]
        cells = [_count(trained, variant) for variant in COLUMNS]
        table.append(f"| {task} | {len(of_task)} | {len(trained)} | {' | '.join(cells)} |")
    return "\n".join(table)


def _count(lines, variant):
    """Such as "98 ✓, 20 fallback, 2 ✗"."""
    marks = {"ok": "✓", "fallback": "fallback", "refused": "✗", "failed": "✗", "not run": "not run"}
    states = [state_of(line, variant)[0] for line in lines]
    found = Counter(marks[state] for state in states if state in marks)
    return ", ".join(f"{found[mark]} {mark}" for mark in dict.fromkeys(marks.values()) if found[mark]) or "–"


def _versions(lines):
    found = sorted({", ".join(f"{k} {v}" for k, v in line["versions"].items()) for line in lines if "versions" in line})
    num_tried = sum(bool(line["found"]) for line in lines)
    return f"{num_tried} of {len(lines)} pairs were tried on a CPU with {'; '.join(found)}."


def _apart(lines):
    items = [
        f"- {line['model']}, {line['task']}: {_reason('', line['found']['plain'][1])}"
        for line in lines
        if is_apart(line)
    ]
    return "\n".join(items) or "None."
