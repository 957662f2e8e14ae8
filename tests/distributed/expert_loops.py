"""Mixtures of experts that one and two processes train in the same way, with experts that get no tokens.

A window has four micro-batches of a few tokens. One process takes all of them, of two processes each takes two.
"""

from pathlib import Path

import torch

from tiny_experts import moe_config, tokenizer
from trimtab import Engine, Recipe, fit
from trimtab.model.load import load_model
from trimtab.techniques.chunked_loss import build_task_loss
from trimtab.training.step import window_gradients

# Many experts for few tokens, so that some are without. Switch has a module for each, the others fused weights.
_SWITCH = {"model_type": "switch_transformers", "d_model": 32, "d_kv": 16, "d_ff": 48, "num_heads": 2, "num_layers": 1}
_SWITCH |= {"num_experts": 8, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "dropout_rate": 0.0}
_SWITCH |= {"num_decoder_layers": 1, "router_jitter_noise": 0.0}
CONFIGS = {
    "mixtral": moe_config("mixtral", num_local_experts=16, num_experts_per_tok=1, output_router_logits=True),
    "qwen3_moe": moe_config("qwen3_moe", num_experts=16, num_experts_per_tok=1, output_router_logits=True),
    "gpt_oss": moe_config("gpt_oss", num_local_experts=16, num_experts_per_tok=1, output_router_logits=True),
    "switch": _SWITCH,
}
SETTINGS = {
    **{f"{name} {way}": {"name": name, "way": way} for name in CONFIGS for way in ("eager", "grouped_mm")},
    "fp16": {"name": "mixtral", "precision": "fp16"},
    "frozen": {"name": "mixtral", "frozen": True},
    "frozen switch": {"name": "switch", "way": "eager", "frozen": True},
    "chunked": {"name": "mixtral", "how": "chunked"},
}
del SETTINGS["switch grouped_mm"]
NUM_STEPS, MAX_NORM = 2, 0.5


def a_model(name, way="grouped_mm", frozen=False):
    torch.manual_seed(3)
    kind = "seq2seq-lm" if name == "switch" else "causal-lm"
    model = load_model(dict(CONFIGS[name]), kind, {}, tokenizer())
    if name != "switch":
        model.set_experts_implementation(way)
    for part, parameter in model.named_parameters():
        if frozen and ".experts." in part:
            parameter.requires_grad_(False)
    return model.train()


def micro_batches(name, step):
    """Rows of different lengths; those of a step have other tokens than those of the step before."""
    generator = torch.Generator().manual_seed(step)
    batches = []
    for length in (3, 5, 2, 4):
        ids = torch.randint(5, 200, (1, length), generator=generator)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        batches.append(batch | ({"decoder_input_ids": ids} if name == "switch" else {}))
    return batches


def experts_with_tokens(model, batches):
    """For each micro-batch, the names of the expert matrices with a gradient that is not zero."""
    found = []
    for batch in batches:
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()
        used = set()
        for name, parameter in model.named_parameters():
            if ".experts." in name and parameter.grad is not None:
                rows = parameter.grad if parameter.ndim == 3 else parameter.grad[None]
                used |= {(name, index) for index, grad in enumerate(rows) if grad.abs().max() > 0}
        found.append(used)
    return found


def train(name, way="grouped_mm", precision="no", frozen=False, how="plain"):
    engine = Engine(mixed_precision=precision, cpu=True)
    model = a_model(name, way, frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
    model, optimizer = engine.prepare(model, optimizer)
    loss = build_task_loss("token-cross-entropy", shifts_labels=name != "switch", how=how)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        own = micro_batches(name, step)[engine.process_index :: engine.num_processes]
        result = window_gradients(engine, model, loss, own, len(own), MAX_NORM)
        totals = engine.reduce(torch.stack([result.loss_sum.float(), torch.as_tensor(result.weight).float()]))
        losses.append(float(totals[0] / totals[1]))
        norms.append(float(result.grad_norm))
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    plain = engine.unwrap_model(model)
    weights = {name: p.detach().clone() for name, p in plain.named_parameters()}
    gradients = {name.removeprefix("module."): gradient for name, gradient in gradients.items()}
    return {"weights": weights, "losses": losses, "norms": norms, "gradients": gradients}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    found = {name: train(**settings) for name, settings in SETTINGS.items()}
    engine = Engine(cpu=True)
    recipe = Recipe(
        model=(folder / "switch").read_text(),
        task="seq2seq",
        data={"train": str(folder / "rows.csv"), "text": "text", "target": "label", "eval_share": 0},
        train={"epochs": 1, "batch_size": 4, "lr": 1e-2, "log_every": 1},
        memory={"micro_batch": 2},
        out=str(folder / f"run-{engine.num_processes}"),
    )
    fit(recipe, device="cpu", progress="quiet")
    torch.save(found, folder / f"{engine.num_processes}-{engine.process_index}.pt")
