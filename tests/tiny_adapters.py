"""Tiny models with adapters that are not zero, and runs with them."""

from pathlib import Path

import torch

from trimtab.checkpoint.export import export_model
from trimtab.model.adapters import LoraSpec, add_adapter
from trimtab.model.fp8 import Fp8
from trimtab.model.load import load_model, load_tokenizer
from trimtab.model.nf4 import Nf4

LABELS = {"num_labels": 2, "id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}


def adapted(base, kind, head=None, spec=None, **options):
    """A base with an adapter whose matrices are not zero, and its tokenizer."""
    tok = load_tokenizer(base)
    torch.manual_seed(0)
    model = load_model(base, kind, head or {}, tok, **options)
    adapter = add_adapter(model, spec or LoraSpec(rank=4))
    shake(adapter)
    return model, tok


def shake(adapter, by=0.1):
    """Change all trainable parameters, as training would."""
    with torch.no_grad():
        for name, tensor in adapter.tensors().items():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor), alpha=by if ".lora_" in name else by / 5)


def export_run(folder, model, tok, data, task="classify", **recipe):
    """The best model of a run in `folder`."""
    base = model.config.name_or_path
    card = {"task": task, "max_length": 32, "recipe": {"model": base, "data": {"train": str(data)}, **recipe}}
    export_model(Path(folder) / "best", model, tok, card=card)
    return Path(folder)


def nf4(dtype=torch.float32):
    return {"quantization": Nf4(dtype), "dtype": dtype, "device": "cpu"}


def fp8(dtype=torch.float32):
    return {"quantization": Fp8(dtype), "dtype": dtype, "device": "cpu"}


def packed_bytes(weight):
    """Bytes of a quantized weight: codes, scales and tables."""
    state = weight.quant_state
    tables = [weight.data, state.absmax, state.code]
    if state.nested:
        tables += [state.offset, state.state2.absmax, state.state2.code]
    return sum(table.untyped_storage().nbytes() for table in tables)
