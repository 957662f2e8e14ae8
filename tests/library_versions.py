"""Features that older versions of transformers lack: their tests are skipped there, where the code refuses them."""

import pytest
import transformers
from packaging.version import Version


def skip_before(version: str, lacks: str) -> None:
    """Skip the rest of a test with an older transformers; `lacks` says what it does not have."""
    if Version(transformers.__version__) < Version(version):
        pytest.skip(f"transformers {transformers.__version__} {lacks}")
