"""The kernels of `trimtab.model.cross_entropy_kernel` in torch's operations, for tests without Triton."""

import torch
from torch.nn import functional

IGNORED = -100


class TorchKernels:
    """Counts its calls, and writes gradients where it is told to."""

    def __init__(self):
        self.dtypes, self.overwritten = [], []

    def token_losses(self, logits_NV, labels_N, smoothing):
        assert logits_NV.stride(-1) == 1
        assert labels_N.is_contiguous()
        self.dtypes.append(logits_NV.dtype)
        losses_N = functional.cross_entropy(
            logits_NV.float(), labels_N, ignore_index=IGNORED, label_smoothing=smoothing, reduction="none"
        )
        return losses_N, logits_NV.float().logsumexp(dim=-1)

    def write_gradient(self, logits_NV, labels_N, norms_N, smoothing, factors, gradient_NV):
        assert gradient_NV.shape == logits_NV.shape
        gradient = (logits_NV.float() - norms_N[:, None]).exp() - smoothing / logits_NV.shape[1]
        has_label = labels_N != IGNORED
        targets = functional.one_hot(labels_N.where(has_label, 0), logits_NV.shape[1])
        gradient = (gradient - (1 - smoothing) * targets) * has_label[:, None]
        factors = factors[:, None] if isinstance(factors, torch.Tensor) else factors
        with torch.no_grad():
            # through data: autograd does not see what a kernel writes
            gradient_NV.data.copy_(gradient * factors)
        self.overwritten.append(gradient_NV.data_ptr() == logits_NV.data_ptr())
