"""What memory is at its peak: exact where the model is known, and adding up to what the allocator counts."""

import copy

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trimtab.optim.build import build_optimizer
from trimtab.report.anatomy import MemoryWatch

pytestmark = pytest.mark.usefixtures("torch_products")
CPU = torch.device("cpu")
WIDE, NARROW, ROWS, VOCAB = 512, 64, 2048, 3000
INPUTS = torch.ones(ROWS, NARROW)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(NARROW, WIDE), torch.nn.Linear(WIDE, NARROW)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Model(torch.nn.Module):
    """Four layers, and a head as wide as a vocabulary if asked."""

    def __init__(self, *, vocab=None, recomputes=False):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(4))
        self.head = None if vocab is None else torch.nn.Linear(NARROW, vocab)
        self.register_buffer("scale", torch.ones(100))
        self.recomputes = recomputes

    def get_output_embeddings(self):
        return self.head

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x if self.head is None else self.head(x)


def num_bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def train_step(model, optimizer, num_micro_batches=1):
    for _ in range(num_micro_batches):
        out = model(INPUTS)
        labels = torch.arange(ROWS)  # each below the vocabulary
        loss = out.square().mean() if model.head is None else functional.cross_entropy(out, labels)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def watched(model, optimizer, num_micro_batches=1):
    train_step(model, optimizer)  # in which the state is born
    watch = MemoryWatch(model, optimizer, CPU)
    watch.start()
    assert watch.is_recording
    train_step(model, optimizer, num_micro_batches)
    return watch.stop()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def test_what_is_known_is_exact():
    """While a second micro-batch goes through backward, all gradients of the first are there."""
    model = Model()
    optimizer = adamw(model)
    anatomy = watched(model, optimizer, num_micro_batches=2)
    parameters = list(model.parameters())
    assert anatomy.weights == num_bytes([*parameters, model.scale])
    assert anatomy.gradients == num_bytes(parameters)
    state = [value for values in optimizer.state.values() for value in values.values()]
    assert anatomy.optimizer_state == num_bytes(state) == 2 * num_bytes(parameters) + 4 * len(parameters)
    assert (anatomy.allocator_slack, anatomy.host_state, anatomy.logits_and_loss) == (None, 0, 0)


def test_gradients_from_before_are_known():
    """A record may begin in the middle of a window."""
    model = Model()
    optimizer = sgd(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    watch = MemoryWatch(model, optimizer, CPU)
    watch.start()
    torch.zeros(8)  # nothing else happens
    assert watch.stop().gradients == num_bytes(model.parameters())


def test_a_large_parameter_in_8_bits_is_stepped_in_slices():
    """On the host the kernel unpacks all that it is given."""
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    model = torch.nn.Linear(4096, 3000, bias=False)
    optimizer = build_optimizer("adam8bit", [{"params": list(model.parameters())}], lr=1e-3)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    watch = MemoryWatch(model, optimizer, CPU)
    watch.start()
    optimizer.step()
    assert watch.stop().temporaries < 2 * num_bytes([model.weight])  # all at once they were five times its size


def test_what_forward_keeps_is_exact():
    """Each layer keeps its input, what tanh gave, and nothing else; the first input is the user's."""
    model = Model()
    anatomy = watched(model, sgd(model))
    kept = 4 * (ROWS * WIDE * 4) + 4 * (ROWS * NARROW * 4)  # the last output is kept by the loss
    assert kept <= anatomy.activations <= kept + 8 * ROWS + 1024  # labels, and a few numbers
    assert anatomy.optimizer_state == 0


def test_parts_add_up_to_what_the_allocator_counts():
    """Against the count that torch itself keeps while it is profiled."""
    model = Model(vocab=VOCAB)
    optimizer = adamw(model)
    anatomy = watched(model, optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        train_step(model, optimizer)
    waiting, counted = list(profiler.profiler.kineto_results.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        counted += [event.extra_fields.total_allocated] if hasattr(event.extra_fields, "total_allocated") else []
    state = [value for values in optimizer.state.values() for value in values.values()]
    lasting = num_bytes([*model.parameters(), *model.buffers(), *state])
    expected = lasting + max(counted) - min(counted)
    assert anatomy.allocated == pytest.approx(expected, rel=0.01)
    assert anatomy.allocated == sum(size for size in anatomy.parts().values() if size is not None)
    assert min(size for size in anatomy.parts().values() if size is not None) >= 0


def test_logits_are_told_from_activations():
    """Logits, their log-softmax, and the gradients of both: each as wide as the vocabulary."""
    model = Model(vocab=VOCAB)
    anatomy = watched(model, sgd(model))
    num_tensors = anatomy.logits_and_loss / (ROWS * VOCAB * 4)
    assert num_tensors in (3, 4)
    assert any("log_softmax" in op and part == "logits and loss" for part, op, *_ in anatomy.largest)


def test_recomputed_activations_are_activations():
    """A checkpointed model keeps the inputs of its layers, and at the peak has one layer's activations again."""
    models = [Model(), Model(recomputes=True)]
    plain, recomputed = (watched(model, sgd(model)) for model in models)
    one_layer, inputs = 2 * ROWS * WIDE * 4, 4 * ROWS * NARROW * 4
    assert one_layer / 2 < recomputed.activations <= one_layer + 2 * inputs < plain.activations


def test_an_optimizer_that_allocates_nothing_is_a_stage_of_the_step():
    model = Model()
    optimizer = sgd(model)
    train_step(model, optimizer)
    watch = MemoryWatch(model, optimizer, CPU)
    watch.start()
    model(INPUTS).square().mean().backward()
    optimizer.step()
    record = watch.stop_and_record()
    assert [name for name, _, _ in record.stage_spans()] == ["forward", "backward", "optimizer"]
    assert record.stage_spans()[-1][2] == 1.0


def test_a_frozen_model_has_no_gradients_and_keeps_little():
    model = Model()
    for layer in model.layers[:3]:
        layer.requires_grad_(False)
    anatomy = watched(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), 2)
    assert anatomy.gradients == num_bytes(model.layers[3].parameters())
    assert anatomy.weights == num_bytes([*model.parameters(), model.scale])
    assert anatomy.activations <= ROWS * (WIDE + 2 * NARROW) * 4 + 8 * ROWS + 1024


def test_watching_changes_nothing():
    torch.manual_seed(1)
    models = [Model(vocab=VOCAB)]
    models.append(copy.deepcopy(models[0]))
    optimizers = [adamw(model) for model in models]
    for watches, model, optimizer in zip((True, False), models, optimizers, strict=True):
        train_step(model, optimizer)
        watch = MemoryWatch(model, optimizer, CPU)
        for _ in range(3):
            if watches:
                watch.start()
            train_step(model, optimizer, 2)
            if watches:
                watch.stop()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    assert not any(p._post_accumulate_grad_hooks for p in models[0].parameters())
    assert not models[0]._forward_pre_hooks


def test_recording_may_begin_inside_a_forward():
    """As a callback does that looks at the batch first."""
    model = Model()
    optimizer = adamw(model)
    train_step(model, optimizer)
    whole = watched(model, optimizer)
    watch = MemoryWatch(model, optimizer, CPU)
    handle = model.register_forward_pre_hook(lambda *_: None if watch.is_recording else watch.start())
    train_step(model, optimizer)
    handle.remove()
    assert watch.stop().parts() == whole.parts()


def test_quantized_weights_count_with_their_scales():
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    layer = bitsandbytes.nn.Linear4bit(NARROW, WIDE, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    model = torch.nn.Sequential(layer.to("cpu"), torch.nn.Linear(WIDE, NARROW))
    state = layer.weight.quant_state
    assert layer.weight.dtype is torch.uint8

    def step():
        model(torch.ones(ROWS, NARROW)).square().mean().backward()
        model.zero_grad()

    step()
    watch = MemoryWatch(model, torch.optim.SGD(model[1].parameters()), CPU)
    watch.start()
    step()
    nf4 = NARROW * WIDE // 2 + num_bytes([state.absmax, state.code])
    if state.nested:
        nf4 += num_bytes([state.offset, state.state2.absmax, state.state2.code])
    assert watch.stop().weights == nf4 + num_bytes(model[1].parameters())
