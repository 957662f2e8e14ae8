"""Train every pair of an architecture and a task that transformers registers, shrunk, with each technique.

    python benchmarks/zoo_train.py                                  # what is not in the results yet
    python benchmarks/zoo_train.py --shard 1/2                      # every second pair
    python benchmarks/zoo_train.py --only 'qwen*:causal-lm' --again # again, whatever the results have
    python benchmarks/zoo_train.py --only @named --kill             # also with a real kill -9
    python benchmarks/zoo_train.py --page                           # write docs/models.md from the results

The results are lines of JSON, one for a pair; a pair that is tried again gets a new line, and the last one counts. Each
pair runs in a process that is forked from one that has imported everything, so a crash or a hang costs one pair.
"""

import argparse
import fnmatch
import gc
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from zoo_pairs import KILLED, NAMED, pairs
from zoo_table import NO_LOGITS, PAGE, append_results, compact_results, read_results, write_page

RESULTS = Path(__file__).parent / "results" / "zoo-train.jsonl"
VARIANTS = ("plain", "fit", "config", "resume", "recompute", "chunked", "packed", "lora")
PACKAGES = ("transformers", "torch", "peft")


def main():
    options = parse()
    if options.page:
        compact_results(options.results, pairs())
        write_page(options.results, PAGE)
        return
    found = read_results(options.results)
    todo = [pair for pair in chosen(options) if options.again or is_open(found.get(pair), options)]
    server = Server(options.time_limit, options.tracebacks)
    try:
        try_pairs(server, todo, found, options)
    finally:
        server.close()


def try_pairs(server, todo, found, options):
    """Add a line of results for each pair."""
    began = time.monotonic()
    for number, pair in enumerate(todo, 1):
        if options.minutes and time.monotonic() - began > 60 * options.minutes:
            break
        line = with_older(server.try_pair(*pair, variants_of(pair, options)), found.get(pair))
        append_results(options.results, line)
        if not options.quiet:
            bad = [f"{name}: {words}" for name, (state, *words) in line["found"].items() if state != "ok"]
            print(f"{number}/{len(todo)} {pair[0]} {pair[1]} {line['seconds']:.1f} s {'; '.join(bad)}", flush=True)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="*", default=["*"], help="patterns MODEL or MODEL:TASK, or @named")
    parser.add_argument("--shard", default="1/1", help="I/N: the Ith of N parts")
    parser.add_argument("--variants", nargs="*", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--kill", action="store_true", help="also kill and resume the ten pairs of that list")
    parser.add_argument("--again", action="store_true", help="try pairs that have results, too")
    parser.add_argument("--retry", action="store_true", help="try pairs again of which something failed or was refused")
    parser.add_argument("--time-limit", type=float, default=120, help="seconds for a pair")
    parser.add_argument("--minutes", type=float, help="begin no pair after this time")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of results")
    parser.add_argument("--tracebacks", type=Path, help="file for the tracebacks of failures")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--page", action="store_true", help="sort the results, write docs/models.md, do nothing else")
    options = parser.parse_args()
    options.variants = tuple(name for name in VARIANTS if name in {"plain", "fit", *options.variants})
    return options


def chosen(options):
    """The pairs that patterns and shard select; the short list first."""
    order = {pair: number for number, pair in enumerate(NAMED)}
    everything = sorted(pairs(), key=lambda pair: order.get(pair, len(order)))
    kept = [pair for pair in everything if any(matches(pair, pattern) for pattern in options.only)]
    part, num_parts = map(int, options.shard.split("/"))
    return kept[part - 1 :: num_parts]


def matches(pair, pattern):
    if pattern == "@named":
        return pair in NAMED
    model, _, task = pattern.partition(":")
    return fnmatch.fnmatch(pair[0], model) and task in ("", pair[1])


def variants_of(pair, options):
    """What to try on a pair; a classifier has no logits to chunk."""
    kept = [name for name in options.variants if name != "chunked" or pair[1] != NO_LOGITS]
    return [*kept, "kill"] if options.kill and pair in KILLED else kept


def is_open(line, options):
    """Whether a pair has no results of these versions for all variants."""
    if line is None or not line["found"] or any(line["versions"].get(name) != version(name) for name in PACKAGES):
        return True
    states = {name: state for name, (state, *_) in line["found"].items()}
    if states.get("plain") != "ok":
        return options.retry
    wanted = set(variants_of((line["model"], line["task"]), options))
    return not wanted <= states.keys() or (options.retry and {"failed", "refused"} & set(states.values()))


def with_older(line, older):
    """A line with the results of variants that were not tried this time, if the versions are the same."""
    is_trained = line["found"].get("fit", ["failed"])[0] == "ok"
    if older is None or not is_trained or older.get("versions") != line["versions"]:
        return line
    return line | {"found": older["found"] | line["found"]}


class Server:
    """The process that has imported everything, and forks one for each pair.

    Args:
        time_limit: Seconds for a pair.
        tracebacks: A file for those of failures that are not refusals.
    """

    def __init__(self, time_limit, tracebacks=None):
        self._tracebacks = tracebacks
        os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        warnings.simplefilter("ignore")
        import torch
        import zoo_variants

        torch.set_num_threads(1)
        self._time_limit = time_limit
        memory = Path("/dev/shm")  # checkpoints are synced to their disk, which costs more than a step of such a model
        self._folder = Path(tempfile.mkdtemp(prefix="zoo-", dir=memory if memory.is_dir() else None))
        os.environ["TRIMTAB_CACHE"] = str(self._folder / "cache")
        self._tokenizer = zoo_variants.make_tokenizer(self._folder / "tokenizer")
        self._variants = zoo_variants
        self._run_pair("bert", "masked-lm", VARIANTS, None, self._folder / "warm")  # imports what runs need
        gc.collect()
        gc.disable()  # the collector of each child would touch, and so copy, all imported objects

    def try_pair(self, model_type, task, variants):
        """The line of results of a pair."""
        began = time.monotonic()
        source, sink = os.pipe()
        folder = self._folder / "pair"
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.close(source)
            with suppress(BaseException):
                os.setpgid(0, 0)
                os.dup2(os.open(os.devnull, os.O_RDWR), 1)
                os.dup2(1, 2)
                self._run_pair(model_type, task, variants, sink, folder)
            os._exit(0)
        os.close(sink)
        found, last = self._read(source, began)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(source)
        shutil.rmtree(folder, ignore_errors=True)
        seconds = time.monotonic() - began
        if last is not None:  # it began and did not end
            late = seconds > self._time_limit
            found[last] = ["failed", f"over {self._time_limit:.0f} s" if late else f"the process ended with {status}"]
        versions = {name: version(name) for name in PACKAGES}
        return {"model": model_type, "task": task, "found": found, "seconds": round(seconds, 1), "versions": versions}

    def _read(self, source, began):
        """Results of variants as they come, and the variant that has not ended."""
        text, last, found = b"", None, {}
        while (left := began + self._time_limit - time.monotonic()) > 0:
            if not select.select([source], [], [], left)[0] or not (piece := os.read(source, 65536)):
                break
            text += piece
            *lines, text = text.split(b"\n")
            for name, result in map(json.loads, lines):
                last = name if result is None else None
                if result is not None:
                    found[name] = result
        return found, last

    def _run_pair(self, model_type, task, variants, sink, folder):
        def tell(*what):
            if sink is not None:
                os.write(sink, json.dumps(what).encode() + b"\n")

        folder.mkdir(parents=True)
        pair = self._variants.Pair(model_type, task, self._tokenizer, folder)
        for name in variants:
            tell(name, None)
            result = self._result(getattr(pair, name))
            tell(name, result)
            if result[0] != "ok" and name in ("plain", "fit"):
                break

    def _result(self, function):
        from trimtab.errors import UserError

        try:
            note = function()
        except self._variants.Fallback as fallback:
            return ["fallback", str(fallback)]
        except UserError as error:
            return ["refused", self._on_one_line(error.problem)]
        except self._variants.Differs as error:
            return ["failed", str(error)]
        except BaseException as error:
            if self._tracebacks:
                with self._tracebacks.open("a") as file:
                    file.write(f"{function.__self__.model_type} {function.__name__}\n{traceback.format_exc()}\n")
            return ["failed", self._on_one_line(f"{type(error).__name__}: {error}")]
        return ["ok"] if note is None else ["ok", note]

    def _on_one_line(self, message):
        """The first line of a message, and the next ones if it ends with a colon; without the name of our folder."""
        first, *others = message.replace(f"{self._folder}/pair/", "").strip().splitlines() or [""]
        while first.rstrip().endswith(":") and others:
            first = f"{first.rstrip()} {others.pop(0).strip()}"
        return first

    def close(self):
        shutil.rmtree(self._folder, ignore_errors=True)


if __name__ == "__main__":
    main()
