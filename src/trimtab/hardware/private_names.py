"""Names of other packages that may change without notice, and the modules here that need them.

Private names begin with an underscore; the others are imported from modules that are not documented. `trimtab doctor`
reports those that the installed versions do not have, and a test compares this list with the source.
"""

import importlib
from collections.abc import Iterator
from typing import Any

from trimtab.hardware.extras import has_package

# In a name, `()` creates an instance without arguments: some attributes exist only on instances.
PRIVATE_NAMES: dict[str, str] = {
    # torch: kernels over lists of tensors
    "torch._foreach_copy_": "converted weights, captured steps, stochastic rounding",
    "torch._foreach_mul_": "accumulation, loss scaling",
    "torch._foreach_zero_": "captured steps",
    "torch._amp_foreach_non_finite_check_and_unscale_": "loss scaling",
    "torch._scaled_mm": "products in fp8",
    "torch._log_softmax": "prediction of autocast",
    "torch._softmax": "prediction of autocast",
    "torch.ops.aten._efficient_attention_backward": "attention of packed rows",
    "torch.ops.aten._efficient_attention_forward": "attention of packed rows",
    "torch.ops.aten._embedding_bag": "prediction of compiled blocks",
    "torch.ops.aten._flash_attention_backward": "attention of packed rows and its prediction",
    "torch.ops.aten._scaled_dot_product_efficient_attention_backward": "prediction of attention",
    "torch.ops.aten._scaled_dot_product_flash_attention_backward": "prediction of attention",
    "torch.ops.aten._flash_attention_forward": "attention of packed rows",
    "torch.ops.aten._foreach_norm": "prediction of clipping",
    "torch.ops.aten._fused_adagrad_": "prediction of optimizers",
    "torch.ops.aten._fused_adam_": "prediction of optimizers",
    "torch.ops.aten._fused_adamw_": "prediction of optimizers",
    "torch.ops.aten._fused_sgd_": "prediction of optimizers",
    "torch.ops.aten._grouped_mm": "prediction of experts",
    "torch.ops.aten._index_put_impl_": "prediction: indices that are masks",
    "torch.ops.aten._local_scalar_dense": "prediction: reads of values",
    "torch.ops.aten._safe_softmax": "prediction of attention",
    "torch.ops.aten._scaled_dot_product_efficient_attention": "prediction of attention",
    "torch.ops.aten._scaled_dot_product_flash_attention": "prediction of attention",
    "torch.ops.aten._scaled_mm": "prediction of products in fp8",
    "torch.ops.aten._softmax_backward_data": "prediction of attention",
    "torch.ops.aten._to_copy": "prediction: values that are copied to the host",
    "torch.ops.aten._unsafe_index": "prediction: indices that are masks",
    "torch.ops.aten._unsafe_view": "prediction of compiled blocks",
    # torch: tensors, modules, optimizers
    "torch.Tensor._base": "LoRA products in place",
    "torch.Tensor._indices": "sparse tensors in checkpoints",
    "torch.Tensor._is_view": "LoRA products in place, prediction of autocast",
    "torch.Tensor._use_count": "prediction: the last use of a tensor",
    "torch.Tensor._values": "sparse gradients",
    "torch.Tensor._version": "recomputation: results that were changed in place",
    "torch.UntypedStorage._cdata": "prediction, recomputation: the identity of a storage",
    "torch.nn.Module()._buffers": "quantized weights",
    "torch.nn.Module()._backward_hooks": "fused kernels of encoders: whether something observes a module",
    "torch.nn.Module()._forward_hooks": "fused kernels of encoders: whether something observes a module",
    "torch.nn.Module()._forward_pre_hooks": "packed rows; fused kernels of encoders",
    "torch.nn.Module()._modules": "cut layers, own loops",
    "torch.nn.Module()._parameters": "quantized and clustered weights",
    "torch.nn.modules.batchnorm._BatchNorm": "several processes",
    "torch.nn.modules.batchnorm._NormBase": "weight decay",
    "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model": "several processes",
    "torch.nn.utils.stateless._reparametrize_module": "prediction of compiled blocks",
    "torch.optim.Adagrad._init_group": "Adagrad without state of frozen parameters",
    "torch.optim.optimizer._global_optimizer_post_hooks": "updates in backward: whether something watches them",
    "torch.optim.optimizer._global_optimizer_pre_hooks": "updates in backward: whether something watches them",
    "torch.autograd.profiler._is_profiler_enabled": "updates in backward: whether something watches them",
    # torch: dispatch, autograd, compiler
    "torch._C._SetExcludeDispatchKeyGuard": "selective recomputation",
    "torch._C._autograd._get_sequence_nr": "prediction: the module of a tensor in backward",
    "torch._C._current_autograd_node": "prediction: the module of a tensor in backward",
    "torch._C._current_graph_task_id": "updates on the host: the end of backward",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "stochastic rounding: which kernels a device has",
    "torch._C._len_torch_dispatch_stack": "compiled blocks in a trace",
    "torch._C._profiler": "memory anatomy",
    "torch._C._storage_Use_Count": "prediction: the last use of a storage",
    "torch._C._accelerator_setAllocatorSettings": "settings of CUDA's allocator",
    "torch.cuda.memory._record_memory_history": "memory anatomy on CUDA",
    "torch.cuda.memory._snapshot": "memory anatomy on CUDA, pictures of out-of-memory errors",
    "torch.autograd.graph.Node._sequence_nr": "prediction: the module of a tensor in backward",
    "torch._dynamo.config": "compiled blocks",
    "torch._dynamo.exc.TorchDynamoException": "compiled blocks: failures",
    "torch._functorch.aot_autograd.aot_function": "prediction of compiled blocks",
    "torch._functorch.config": "compiled blocks",
    "torch._functorch.partitioners.min_cut_rematerialization_partition": "prediction of compiled blocks",
    "torch._inductor.config": "compiled blocks",
    "torch._inductor.decomposition": "prediction of compiled blocks",
    "torch.ops.aten.mm.default._overloadpacket": "prediction: the name of an operation",
    "torch.ops.aten.mm.default._schema": "prediction, recomputation: arguments that are written",
    "torch.autograd.Variable._execution_engine": "updates on the host: the end of backward",
    "torch.fx.experimental._config": "compiled blocks",
    "torch.utils._foreach_utils._get_foreach_kernels_supported_devices": "prediction of optimizers",
    "torch.utils._foreach_utils._get_fused_kernels_supported_devices": "prediction of optimizers",
    "torch.utils._python_dispatch.TorchDispatchMode": "prediction, selective recomputation",
    "torch.utils._python_dispatch._disable_current_modes": "prediction of compiled blocks and of known values",
    "torch.utils._python_dispatch._get_current_dispatch_mode": "prediction of fused kernels",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": "LoRA products under recomputation",
    "torch.utils._pytree.tree_map_only": "checkpoints",
    "torch.utils.checkpoint._recomputation_hook": "prediction of recomputation",
    # torch: devices, processes
    "torch._C._distributed_c10d.Store": "several processes",
    "torch.cpu._is_amx_tile_supported": "native dtypes of a CPU",
    "torch.cpu._is_avx512_bf16_supported": "native dtypes of a CPU",
    "torch.distributed.distributed_c10d._get_default_store": "several processes",
    "torch.mps._get_default_mps_generator": "random numbers on Apple GPUs",
    # transformers
    "transformers.PreTrainedModel._init_weights": "quantized weights: new heads",
    "transformers.PreTrainedModel._keep_in_fp32_modules": "quantized weights",
    "transformers.PreTrainedModel._keep_in_fp32_modules_strict": "quantized weights",
    "transformers.PretrainedConfig._attn_implementation": "attention backends, packed rows",
    "transformers.PretrainedConfig._experts_implementation": "experts in half precision",
    "transformers.core_model_loading.ConversionOps": "fp8 weights",
    "transformers.integrations.gguf.gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS": "GGUF files",
    "transformers.integrations.sdpa_attention.repeat_kv": "attention backends",
    "transformers.integrations.sdpa_attention.sdpa_attention_forward": "attention backends",
    "transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS": "packed rows",
    "transformers.masking_utils.is_tracing": "CUDA graphs of batches without a mask",
    "transformers.masking_utils.sdpa_mask": "attention backends, packed rows",
    "transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS": "packed rows",
    "transformers.models.auto.configuration_auto.CONFIG_MAPPING": "models from a config",
    "transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "the task of a saved model",
    "transformers.models.bert.modeling_bert": "fused kernels of encoders",
    "transformers.models.llama.modeling_llama": "fused rotary embeddings",
    "transformers.models.llama.modeling_llama.apply_rotary_pos_emb": "fused rotary embeddings",
    "transformers.pytorch_utils.Conv1D": "adapters and quantized weights of GPT-2",
    "transformers.quantizers.auto.register_quantizer": "fp8 weights",
    "transformers.quantizers.base.HfQuantizer": "fp8 weights",
    "transformers.quantizers.quantizer_bnb_4bit.Bnb4BitHfQuantizer": "quantize: nf4",
    "transformers.quantizers.quantizer_bnb_8bit.Bnb8BitHfQuantizer": "quantize: bnb-int8",
    "transformers.quantizers.quantizer_torchao.TorchAoHfQuantizer": "quantize: formats of torchao",
    "transformers.utils.chat_template_utils.render_jinja_template": "chat: spans of answers",
    "transformers.utils.quantization_config.QuantizationConfigMixin": "fp8 weights",
    # peft, torchao, liger-kernel
    "peft.tuners.ia3.IA3Layer": "adapters",
    "peft.tuners.lora.LoraLayer": "adapters",
    "peft.utils.constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING": "adapter: ia3",
    "peft.utils.constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING": "adapter: ia3",
    "peft.utils.save_and_load.load_peft_weights": "adapters",
    "peft.utils.transformers_weight_conversion": "adapters: names of modules are kept",
    "torchao.prototype.safetensors.safetensors_support.flatten_tensor_state_dict": "quantize: formats of torchao",
    "liger_kernel.ops.fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction": "memory.loss: liger",
    "liger_kernel.transformers.monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN": "memory.kernels: liger",
}


def missing_names(names: dict[str, str] = PRIVATE_NAMES) -> dict[str, str]:
    """The listed names that installed packages lack, with the modules that need them; missing packages are skipped."""
    return {name: use for name, use in names.items() if has_package(name.partition(".")[0]) and not _exists(name)}


def _exists(name: str) -> bool:
    parts = name.split(".")
    found, rest = _module_of(parts)
    try:
        for part in rest:
            found = getattr(found, part.removesuffix("()"))
            if part.endswith("()"):
                found = found()
    except AttributeError:
        return False
    return True


def _module_of(parts: list[str]) -> tuple[Any, Iterator[str]]:
    """The longest prefix of a name that is a module, and the rest."""
    for end in range(len(parts), 0, -1):
        try:
            return importlib.import_module(".".join(parts[:end])), iter(parts[end:])
        except ImportError:
            continue
    raise ImportError(f"no module in {'.'.join(parts)}")
