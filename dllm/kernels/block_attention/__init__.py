from dllm.kernels.block_attention.api import attention_and_lse, block_attention, decode_attention, platform

__all__ = ["attention_and_lse", "block_attention", "decode_attention", "platform"]
