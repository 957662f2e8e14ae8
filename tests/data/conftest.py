"""Tokenizers for the tests of data, and the log lines."""

import os
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.append(HERE)

from task_tokenizers import make_bert, make_gpt, make_llama  # noqa: E402

STORIES = Path(os.environ.get("TRIMTAB_TEST_DATA", "nowhere")) / "models/stories260k-llama"


@pytest.fixture(scope="session")
def bert():
    return make_bert()


@pytest.fixture(scope="session")
def gpt():
    return make_gpt()


@pytest.fixture(scope="session")
def llama():
    return make_llama()


@pytest.fixture
def fresh_gpt():
    """One that a test may change."""
    return make_gpt()


@pytest.fixture
def fresh_llama():
    return make_llama()


@pytest.fixture
def stories():
    if not STORIES.is_dir():
        pytest.skip("TRIMTAB_TEST_DATA names no folder with models/stories260k-llama, a Llama of 260k")
    return AutoTokenizer.from_pretrained(STORIES)


@pytest.fixture
def said(monkeypatch):
    """Every log line of data, also one that was logged before in this process."""
    lines: list[str] = []
    for module in ("bad_rows", "delimited", "rows", "sources", "streams", "tokens", "tasks.chat", "tasks.causal_lm"):
        for name in ("say", "log_info_once"):
            monkeypatch.setattr(f"trimtab.data.{module}.{name}", lines.append, raising=False)
    return lines
