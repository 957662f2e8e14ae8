"""A small Llama as a GGUF file."""

import numpy


def write_gguf(path, model):
    """Write a Llama in fp32, with a tokenizer of bytes and letters."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdefghijklmnopqrst"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([-float(index) for index in range(len(words))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(words) - 259))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    parts = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    parts |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    parts |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{ours}": f"blk.{layer}.{theirs}" for ours, theirs in parts.items()}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if module not in names:
            continue
        values = tensor.numpy()
        num_heads = heads.get(module.rpartition(".")[2])
        if num_heads:  # GGUF keeps the halves of a rotation side by side
            values = values.reshape(num_heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(f"{names[module]}.weight", numpy.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
