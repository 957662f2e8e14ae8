"""Shared by all tests: one thread a process, no hub, and nothing left behind."""

import atexit
import contextlib
import gc
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["TRIMTAB_CACHE"] = "off"  # not the user's: own_folder has one
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="trimtab-state-")  # not the user's either
os.environ["TRIMTAB_TRACK"] = "none"  # making a store takes seconds; tests of tracking take this away
os.environ["TRIMTAB_CPU_PRECISION"] = "fp32"  # what `auto` is on a CPU: the same bits on every processor
os.environ.pop("MLFLOW_TRACKING_URI", None)

import pytest
import torch
from hypothesis import HealthCheck, settings

import product_order
from time_limits import pytest_runtest_setup, pytest_xdist_make_scheduler  # noqa: F401  hooks
from trimtab import log
from trimtab.hardware.inventory import describe_slow_precision

# Logged once in a process: not in the test that happens to be the first one in half precision.
log._logged_once |= {describe_slow_precision(name, torch.device("cpu")) for name in ("fp16", "bf16", "bf16-pure")}

atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

product_order.change()

# A job in the background of a shell ignores interrupts, one of nohup the end of a terminal; the tests send both.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The same examples everywhere, and none is too slow: how long one takes is a matter of the machine.
settings.register_profile(
    "tests", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

# These take long in few tests: begun first, none of them is left alone at the end. "tests" are the files beside this.
LONG = (
    *("tracking", "docs", "distributed", "faults", "cli", "training", "planner", "resume"),
    *("techniques", "numerics", "commands", "model", "tests"),
)

# torch.compile sets these when it compiles for the first time, and leaves them set: where compiled code is kept, which
# assembler Triton calls, and two switches of OpenMP, which the compiled code links.
SET_BY_TORCH = (
    *("TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH"),
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),
    "CUBLAS_WORKSPACE_CONFIG",  # by deterministic runs on a GPU
)
SET_BY_MLFLOW = ("_MLFLOW_TELEMETRY_SESSION_ID",)  # when it is imported

REPOSITORY = Path(__file__).parent.parent


def pytest_collection_modifyitems(items) -> None:
    folder = {item: item.path.parent.name for item in items}
    items.sort(key=lambda item: LONG.index(folder[item]) if folder[item] in LONG else len(LONG))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    set_aside()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item, nextitem):
    yield
    if nextitem is not None and nextitem.path != item.path:
        set_aside()


count_frozen = gc.get_freeze_count
gc.get_freeze_count = lambda: 1  # to count visits each of those objects, and every `fit` asks whether there are any


def set_aside() -> None:
    """Keep the collector of cycles away from what stays for good.

    Half a million objects are there after the imports. Each `fit` begins with a full collection, which would look at
    all of them: a quarter of the time of these tests.
    """
    gc.collect()
    gc.freeze()


IGNORED = ("runs", "mlruns", "build", "dist", "__pycache__")  # by git: never committed by accident


def folders_of_repository() -> set[str]:
    found = {entry.name for entry in os.scandir(REPOSITORY) if entry.is_dir() and not entry.name.startswith(".")}
    return found.difference(IGNORED)


@pytest.fixture
def _counts_frozen_objects(monkeypatch):
    monkeypatch.setattr(gc, "get_freeze_count", count_frozen)


@pytest.fixture(autouse=True)
def _reproducible_and_clean(request):
    """Every test starts from one seed; what it does to the environment or the default dtype is an error.

    So is a folder that it leaves at the root of the repository, where tests start: they write to `tmp_path`.

    The command line, called in this process, sets for good how loud the log is: that is taken back.
    """
    if "gpu" in request.keywords:
        torch.manual_seed(0)
    else:  # the other takes down a stack for each kind of device that is not here
        torch.default_generator.manual_seed(0)
    environment, folders = dict(os.environ), folders_of_repository()
    log = logging.getLogger("trimtab")
    loudness = (log.level, log.disabled, log.propagate, log.handlers[:])
    yield
    log.setLevel(loudness[0])
    log.disabled, log.propagate, log.handlers[:] = loudness[1:]
    changed = {key for key in environment.keys() | os.environ.keys() if environment.get(key) != os.environ.get(key)}
    assert changed <= {"PYTEST_CURRENT_TEST", *SET_BY_TORCH, *SET_BY_MLFLOW}, changed
    assert torch.get_default_dtype() is torch.float32
    assert folders_of_repository() <= folders, "a test writes to the current folder: use own_folder"


@pytest.fixture(autouse=True)
def _without_samples(request, monkeypatch):
    """In this process, only runs of tests with the mark end with samples, which take as long as a tiny run."""
    if request.node.get_closest_marker("samples") is None:
        monkeypatch.setattr("trimtab.build.samples.GENERATING_TASKS", ())


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Folders with tiny models, each made when it is first asked for."""
    import transformers.models.bert.modeling_bert  # noqa: F401  not above: tests of small parts do without

    from tiny_runs import TinyModels

    set_aside()
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory):
    """Starts processes that need not import anything; one for all tests of a worker."""
    from forked import ForkServer

    server = ForkServer(tmp_path_factory.mktemp("forked"))
    yield server
    server.close()


@pytest.fixture
def process_group(tmp_path):
    """The default process group, of this process alone; it ends in the order that cannot hang."""
    from torch import distributed

    from trimtab.distributed.gloo_threads import wait_for_idle_gloo

    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    wait_for_idle_gloo()
    distributed.destroy_process_group()


@pytest.fixture
def torch_products():
    """Products are computed as torch does it, and allocate only their results: for tests that count bytes."""
    with product_order.suspended():
        yield


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """The test works in an empty folder, which also holds its cache and its temporary files."""
    import tempfile

    work, temporary = tmp_path / "work", tmp_path / "temporary"
    work.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return work


@pytest.fixture
def file_size_limit():
    """A context in which no file can grow beyond so many bytes: the system itself refuses the write."""

    @contextlib.contextmanager
    def limited(num_bytes):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


@pytest.fixture
def as_somebody():
    """A folder that anyone can reach, and a context in which this process is not root."""
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o755)

    @contextlib.contextmanager
    def unprivileged():
        if os.geteuid() != 0:
            yield
            return
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)

    yield place, unprivileged
    for folder in (place, *(path for path in place.rglob("*") if path.is_dir())):
        folder.chmod(0o755)
    shutil.rmtree(place)


@pytest.fixture
def trimtab_command(monkeypatch, capsys):
    """Runs a command in this process; returns its exit code, stdout and stderr."""
    from trimtab.cli.main import main

    monkeypatch.setenv("COLUMNS", "240")
    logger = logging.getLogger("trimtab")
    handlers, level = list(logger.handlers), logger.level
    on_interrupt = signal.getsignal(signal.SIGINT)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["trimtab", *map(str, arguments)])
        with pytest.raises(SystemExit) as ending:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return ending.value.code or 0, out, err

    yield run
    signal.signal(signal.SIGINT, on_interrupt)
    logger.handlers[:] = handlers
    logger.setLevel(level)
