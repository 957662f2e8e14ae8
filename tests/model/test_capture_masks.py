"""Masks while a step is captured: none where a batch has none. tests/gpu/test_engine_graphs.py has the kernels."""

import threading

import torch
from transformers import masking_utils

from trimtab.model.capture_masks import usual_masks


def test_a_batch_without_a_mask_gets_none(monkeypatch):
    monkeypatch.setattr(masking_utils, "is_tracing", lambda tensor=None: True)  # as while a stream is captured
    seen = []
    with usual_masks():
        assert not masking_utils.is_tracing(None)
        assert masking_utils.is_tracing(torch.ones(1)), "its values are not known when the graph runs"
        other = threading.Thread(target=lambda: seen.append(masking_utils.is_tracing(None)))
        other.start()
        other.join()
    assert seen == [True], "other threads do not capture"
    assert masking_utils.is_tracing(None)
