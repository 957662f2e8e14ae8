"""Other threads during a plan compute the same bits as without one, and two plans at once are both right."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import trimtab
from tiny_models import CONFIGS
from trimtab.log import log_info_once, logger, muted, say
from trimtab.model import linear_cross_entropy
from trimtab.planner.trace.default_dtype import own_default_dtype
from trimtab.planner.trace.thread_patches import stand_ins_on_this_thread

GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 6, "n_head": 4, "vocab_size": 500}
# between them, every stand-in of the planner is in use
ASKED = [
    {"precision": "bf16", "gradient_checkpointing": "all"},
    {"precision": "fp16", "gpu": "t4", "loss": "chunked", "num_micro_batches": 2},
    {"precision": "bf16", "adapter": "qlora"},
    {"precision": "bf16-pure", "optimizer": "adamw8bit"},
    {"precision": "bf16", "code": "transformers", "gradient_checkpointing": "all", "mask": "padded"},
]


def predicted(asked):
    found = trimtab.predict_step_memory(GPT2, "causal-lm", 4, 64, **asked)
    return found.allocated, found.reserved, dict(found.parts), found.trace.ops


class RealStep:
    """Attention, dropout, autocast, a recomputed block, a chunked loss, backward and an optimizer step, with data."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(2, 2, 16, 8, generator=generator)
        self._weight = torch.randn(8, 8, generator=generator)
        self._head = torch.randn(40, 8, generator=generator)
        self._labels = torch.randint(40, (64,), generator=generator)

    def __call__(self):
        torch.manual_seed(7)
        weight = self._weight.clone().requires_grad_()
        optimizer = torch.optim.AdamW([weight], lr=0.1)

        def block(x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = functional.linear(x, weight)
            x = functional.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=0.25).float()
            return functional.dropout(x, 0.5)

        hidden = checkpoint(block, block(self._inputs), use_reentrant=False).reshape(64, 8)
        job = linear_cross_entropy.Job()
        loss, _ = linear_cross_entropy.chunked_cross_entropy(hidden, self._head, None, self._labels, job)
        loss.backward()
        gradient = weight.grad.clone()
        optimizer.step()
        tensors = (loss.detach(), gradient, weight.detach(), torch.rand(3), torch.empty(0))
        chunks = list(linear_cross_entropy._slices(10**6, 1000))
        return (
            [(t.dtype, t.numpy().tobytes()) for t in tensors],
            chunks,
            isinstance(torch.autocast("cpu"), torch.autocast),
        )


class InAnotherThread:
    """Calls a function over and over until the end of a `with`, and keeps every result that is not the expected one."""

    def __init__(self, function, expected):
        self._function, self._expected = function, expected
        self._end, self._thread = threading.Event(), threading.Thread(target=self._run)
        self.num_calls, self.others = 0, []

    def _run(self):
        while not self._end.is_set():
            self.num_calls += 1
            try:
                found = self._function()
            except Exception as error:  # counted, in the place of ending the thread
                found = repr(error)
            if found != self._expected:
                self.others.append(found)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()


@pytest.fixture(scope="module")
def expected_plans():
    return [predicted(asked) for asked in ASKED]


@pytest.mark.slow
def test_another_thread_computes_the_same_bits_during_plans(expected_plans):
    step = RealStep()
    with InAnotherThread(step, step()) as other:
        found = [predicted(asked) for asked in ASKED]
    assert other.num_calls > 1
    assert other.others == []
    assert found == expected_plans


@pytest.mark.parametrize("asked", [{"adapter": "lora"}, {"gradient_checkpointing": "all"}])
def test_a_plan_draws_no_random_numbers(asked):
    """They are the run's, whose bits do not depend on whether it was planned."""
    before = torch.get_rng_state()
    predicted(asked)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_two_plans_at_once_are_both_right(expected_plans):
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(predicted, ASKED))
    assert found == expected_plans
    assert torch.get_default_dtype() is torch.float32


def test_a_stand_in_acts_on_its_own_thread_alone():
    with ThreadPoolExecutor(1) as pool:
        with stand_ins_on_this_thread([(functional, "relu", lambda x: "stand-in")]):
            assert functional.relu(torch.tensor(-1.0)) == "stand-in"
            assert pool.submit(functional.relu, torch.tensor(-1.0)).result() == 0.0
        assert functional.relu(torch.tensor(-1.0)) == 0.0


def test_a_muted_thread_mutes_no_other(caplog):
    caplog.set_level(logging.INFO, logger=logger.name)
    with ThreadPoolExecutor(1) as pool, muted():
        say("of a trial run")
        log_info_once("of a trial run, once")
        pool.submit(log_info_once, "of another thread").result()
    log_info_once("of another thread")
    log_info_once("of a trial run, once")
    assert caplog.messages == ["of another thread", "of a trial run, once"]


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "marian", "m2m_100", "jamba"])
def test_a_model_in_half_precision_is_the_same_without_the_default_dtype(name):
    """Some of its buffers follow the default dtype, others say their own; m2m_100 asks for it, jamba promotes to it."""
    config = CONFIGS.get(name) or {"model_type": name, "num_hidden_layers": 2, "encoder_layers": 1, "decoder_layers": 1}
    kind = (
        transformers.AutoModelForSeq2SeqLM if name in ("t5", "marian", "m2m_100") else transformers.AutoModelForCausalLM
    )

    def dtypes():
        values = dict(config)
        made = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        with torch.device("meta"):
            model = kind.from_config(made, dtype=torch.bfloat16)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return {"config": made.dtype} | {name: (tensor.dtype, tensor.shape) for name, tensor in tensors}

    usual = dtypes()
    with own_default_dtype():
        assert dtypes() == usual
