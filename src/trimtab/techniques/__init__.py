"""All techniques, in the order in which messages and tables list them. A new one is a file and a line here."""

from trimtab.techniques.activation_offload import ActivationOffload
from trimtab.techniques.adapter import AdapterTechnique
from trimtab.techniques.attention_backend import AttentionBackend
from trimtab.techniques.base import Technique
from trimtab.techniques.chunked_loss import ChunkedLoss
from trimtab.techniques.compilation import Compilation
from trimtab.techniques.host_embeddings import HostEmbeddings
from trimtab.techniques.kernels import FusedKernels
from trimtab.techniques.offloaded_state import StateOffload
from trimtab.techniques.optimizer_state import OptimizerState
from trimtab.techniques.padding import Padding
from trimtab.techniques.recomputation import GradientCheckpointing
from trimtab.techniques.sequence_tiles import SequenceTiles
from trimtab.techniques.streamed_weights import StreamedWeights
from trimtab.techniques.weight_update import WeightUpdate

TECHNIQUES: list[Technique] = [
    AdapterTechnique(),
    GradientCheckpointing(),
    ActivationOffload(),
    ChunkedLoss(),
    OptimizerState(),
    WeightUpdate(),
    StateOffload(),
    StreamedWeights(),
    HostEmbeddings(),
    FusedKernels(),
    SequenceTiles(),
    AttentionBackend(),
    Padding(),
    Compilation(),
]
