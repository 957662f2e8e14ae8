"""Encoders, encoder-decoders and classifiers of transformers are predicted from their default configs.

A step has to be traced, and to contain the weights and the optimizer state of the model: test_known_values.py compares
activations with real ones. benchmarks/planner/zoo.py tries all architectures.
"""

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

import trimtab
from library_versions import skip_before
from trimtab.errors import ModelError
from trimtab.model.load import AUTO_CLASSES

TASKS = {
    "classify": ("sequence-classification", modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
    "masked-lm": ("masked-lm", modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "seq2seq": ("seq2seq-lm", modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
}
ENCODERS = ["bert", "roberta", "distilbert", "electra", "albert"]
ENCODERS += ["deberta-v2", "modernbert", "xlm-roberta", "mpnet", "longformer"]
PAIRS = ["t5", "mt5", "umt5", "bart", "mbart", "pegasus", "m2m_100", "marian", "led", "switch_transformers"]
DECODERS = ["gpt2", "gpt_neox", "opt", "llama", "mistral", "qwen2", "qwen3", "qwen3_5", "gemma", "gemma2"]
DECODERS += ["gemma3_text", "phi", "phi3", "falcon", "bloom", "mpt", "starcoder2", "glm4", "smollm3", "stablelm"]
# The default DeBERTa-v2 has plain attention; every one on the hub has this.
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256}
QUICK = [("longformer", "classify"), ("t5", "classify"), ("bart", "classify"), ("blenderbot-small", "seq2seq")]
NAMED = [(name, task) for task, (_, registered) in TASKS.items() for name in ENCODERS + PAIRS if name in registered]
NAMED += [(name, "classify") for name in DECODERS if name in TASKS["classify"][1]]
ROWS, LENGTH = 2, 128


def assert_predicted(name, task, precision="bf16", **settings):
    """The peak of a step contains the weights and the optimizer state of the model, and more."""
    found = trimtab.predict_step_memory({"model_type": name, **settings}, task, ROWS, LENGTH, precision=precision)
    config = transformers.AutoConfig.for_model(name, **settings)
    with torch.device("meta"):
        model = getattr(transformers, AUTO_CLASSES[TASKS[task][0]]).from_config(config)
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    # a head has as many labels as the task; buffers, tables of positions for example, are weights, too
    assert found.parts["weights"] == pytest.approx(num_bytes, rel=0.01)
    assert found.parts["optimizer state"] == pytest.approx(2 * num_bytes, rel=0.01)
    assert found.allocated > 3 * num_bytes


@pytest.mark.parametrize(("name", "task"), QUICK)
def test_a_sample_is_predicted(name, task):
    if name == "longformer":
        skip_before("5.22", "divides Longformer's rows by code that cannot be traced")
    assert_predicted(name, task)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "task"), [pair for pair in NAMED if pair not in QUICK])
def test_every_named_model_is_predicted_for_each_of_its_tasks(name, task):
    assert_predicted(name, task)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classify", "masked-lm"])
def test_disentangled_attention_is_predicted(task):
    assert_predicted("deberta-v2", task, **DISENTANGLED)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["longformer", "bart", "t5"])
@pytest.mark.parametrize("options", [{"code": "transformers"}, {"mask": "padded"}, {"gradient_checkpointing": "all"}])
def test_other_steps_of_a_classifier_are_predicted(name, options):
    plain = trimtab.predict_step_memory({"model_type": name}, "classify", 16, 256, precision="bf16")
    found = trimtab.predict_step_memory({"model_type": name}, "classify", 16, 256, precision="bf16", **options)
    if "gradient_checkpointing" in options:
        assert found.allocated < plain.allocated
    else:
        assert found.allocated == pytest.approx(plain.allocated, rel=0.1)


def test_what_a_gpu_cannot_compute_is_not_predicted():
    # FNet's transform exists in fp32 alone, and CUDA's autocast, unlike the CPU's, does not cast its inputs
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert not has_kernel("aten::fft_fftn", "AutocastCUDA")
    with pytest.raises(ModelError, match="BFloat16"):
        trimtab.predict_step_memory({"model_type": "fnet"}, "masked-lm", ROWS, LENGTH, precision="bf16")
    assert_predicted("fnet", "masked-lm", precision="fp32")
