"""A small self-speculative model on the prose of your own Python's documentation: what `make quickstart` trains.

python experiments/train.py --config=configs/quickstart.py --workdir=runs/quickstart
"""

from ml_collections import ConfigDict


def get_config():
    config = ConfigDict()
    config.data = dict(name="pydocs", path="", length=32, lexicon=0)
    config.model = dict(name="hybrid", vocab=27, length=32, width=64, n_noncausal=3, n_causal=1, heads=2, mlp=192)
    config.model.update(theta=1e4, residual=True, gain=0.1, pairing="crossed", dtype="float32", remat=True)
    config.objective = dict(name="ssmd")
    config.optim = dict(lr=4e-3, warmup=100, b1=0.9, b2=0.98, weight_decay=0.01, clip=1.0, ema=0.995, train_only="")
    config.train = dict(seed=0, steps=2500, batch=64, init_from="")
    config.train.update(log_every=100, eval_every=500, eval_batches=16, sample_every=1250, save_every=500)
    config.mesh = dict(data=-1, fsdp=1, tensor=1)
    config.sampler = dict(name="self_speculative", window="cosine", rate=0.125, n_verify=3, verification="chain")
    return config
