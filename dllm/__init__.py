"""dllm: language models that write several tokens per network pass."""

__version__ = "0.1.0"
