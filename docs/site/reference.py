"""The pages of the reference, generated from the code each time the site is built."""

from command_line import command_line_page
from python_api import engine_page, python_page
from trimtab.cli.train import INTERRUPTED
from trimtab.errors import TrimtabError
from trimtab.hardware.catalog import CATALOG, GIB
from trimtab.runs.contents import CONTENTS


def reference_pages() -> dict[str, str]:
    """All pages, by their path in the site."""
    return {
        "reference/command-line.md": command_line_page(),
        "reference/python.md": python_page(),
        "reference/engine.md": engine_page(),
        "reference/exit-codes.md": exit_codes_page(),
        "reference/run-folder.md": run_folder_page(),
        "reference/gpus.md": gpus_page(),
    }


def exit_codes_page() -> str:
    """Exit codes and the exceptions behind them, as a tree."""
    codes = {0: "done", TrimtabError.exit_code: "any other failure"}
    for kind in _below(TrimtabError):
        codes.setdefault(kind.exit_code, _sentence(kind))
    codes[INTERRUPTED] = "a second Ctrl-C: stopped immediately, nothing was saved"
    table = "\n".join(f"| {code} | {meaning} |" for code, meaning in sorted(codes.items()))
    tree = "\n".join(_branches(TrimtabError, ""))
    return f"""# Exit codes and exceptions

| code | meaning |
|---|---|
{table}

A command prints one message to standard error, with the cure, and never a traceback for a mistake of yours. A script
that calls `fit` gets these exceptions instead; all are in `trimtab.errors`.

{tree}

75 means: call again. [Resume](../resume.md#a-clean-stop-exit-code-75) has the loop for a shell and for SLURM.
"""


def run_folder_page() -> str:
    """The files of a run."""
    rows = "\n".join(f"| `{name}` | {meaning} |" for name, meaning in CONTENTS.items())
    return f"""# Files of a run

A run has a folder, `runs/EXPERIMENT/NAME` or `--out DIR`. It is the result, and the only source of what trackers get.

| file | contents |
|---|---|
{rows}

[What happens when you train](../training.md), [resume](../resume.md), [tracking](../tracking.md).
"""


def gpus_page() -> str:
    """The devices that a plan can be made for."""
    rows = "\n".join(
        f"| `{device.name}` | {device.memory_bytes / GIB:.2f} | {device.bandwidth / 1e9:,.0f} "
        f"| {device.rate('fp16') / 1e12:,.0f} | {['no', 'yes'][device.native_bf16]} | {device.host_link / 1e9:,.0f} |"
        for device in CATALOG.values()
        if not device.is_cpu
    )
    return f"""# GPUs that plans know

Names for `trimtab plan --gpu` and `trimtab memory --gpu`, also spelled as in `nvidia-smi` ("RTX 4090"). The device of
this machine needs no name, and `--memory 16GiB` plans for less than all of its memory.

| name | GiB | GB/s | TFLOP/s in fp16 | bf16 | GB/s to the host |
|---|---|---|---|---|---|
{rows}

GiB are what torch reports, which is less than advertised. Rates are those of data sheets (products with fp32
accumulation); the link to the host is a rule of thumb for the generation of PCIe, but for the H200, where it was
measured. How accurate predicted times are: [the planner](../planner.md#time). `cpu` plans for a desktop CPU.
"""


def _below(kind: type[TrimtabError]) -> list[type[TrimtabError]]:
    return [found for child in kind.__subclasses__() for found in (child, *_below(child))]


def _branches(kind: type[TrimtabError], indent: str) -> list[str]:
    line = f"{indent}- `{kind.__name__}` ({kind.exit_code}): {_sentence(kind)}"
    children = [child for child in kind.__subclasses__() if child.__module__ == "trimtab.errors"]
    return [line, *(text for child in children for text in _branches(child, indent + "    "))]


def _sentence(kind: type) -> str:
    text = (kind.__doc__ or "").strip().splitlines()[0].removesuffix(".")
    return text[0].lower() + text[1:]
