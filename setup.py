"""`pip install -e .[test,plots,hf]` is what `make` runs. Every requirement is bounded on both sides: the JAX family moves fast."""

from setuptools import find_packages, setup

CORE = [
    "absl-py>=2.1,<3",
    "flax>=0.12.10,!=0.12.11,<0.13",  # Linen, struct and core only; 0.12.11 was withdrawn
    "grain>=0.2.16,<0.3",
    "jax>=0.11.2,<0.13",
    "jaxtyping>=0.3.3,<0.4",
    "ml_collections>=1.1,<2",
    "numpy>=2.1,<3",
    "optax>=0.2.8,<0.3",
    "orbax-checkpoint>=0.12,<0.13",
]

EXTRAS = {
    "aot": ["jax-cuda13-pjrt>=0.11.2,<0.13", "jax-cuda13-plugin>=0.11.2,<0.13", "jax[tpu]>=0.11.2,<0.13"],
    "hf": ["gguf>=0.17,<1", "safetensors>=0.8,<1", "tokenizers>=0.22,<1"],
    "parquet": ["pyarrow>=18,<27"],
    "plots": ["matplotlib>=3.9,<4"],
    "tfds": ["importlib_resources>=6.4,<8", "tensorflow-datasets>=4.9.9,<5"],  # with no TensorFlow; the first is an undeclared need of it
    "test": ["beartype>=0.22,<0.24", "pytest>=8.3,<10", "pytest-xdist>=3.6,<4", "ruff>=0.17,<0.18"],
    "cuda13": ["jax[cuda13]>=0.11.2,<0.13"],
    "tpu": ["jax[tpu]>=0.11.2,<0.13"],
}

setup(
    name="dllm",
    version="0.1.0",
    description="Language models that write several tokens per network pass, in JAX and Flax",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=find_packages(include=["dllm", "dllm.*"]),
    install_requires=CORE,
    extras_require=EXTRAS,
)
