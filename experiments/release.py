"""Writes a trained run's EMA weights as a small folder that serves as --workdir wherever a trained model is read.

    python experiments/release.py --workdir=runs/text8 --out=FOLDER
    python experiments/sample.py  --workdir=FOLDER --sampler=self_speculative

Weights are rounded to float16; the config loses data.path and train.init_from, so programs that read the data want --data_path.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from dllm.core.config import main
from dllm.data import tokenizers
from dllm.evals.spelling import read_words
from dllm.train import release
from dllm.train.checkpoint import load_run

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", None, "workdir of a trained run", required=True)
flags.DEFINE_string("out", None, "folder of the release", required=True)
flags.DEFINE_integer("step", None, "checkpoint to release; the latest by default")


def run() -> None:
    loaded = load_run(FLAGS.workdir, FLAGS.step)
    own = Path(FLAGS.workdir) / tokenizers.FOLDER
    if own.is_dir():
        extra = {f"{tokenizers.FOLDER}/{name}": data for name, data in tokenizers.files(own).items()}
    else:
        read_words(FLAGS.workdir)  # for its error
        extra = {"words.txt.gz": (Path(FLAGS.workdir) / "words.txt.gz").read_bytes()}
    files = release.write(FLAGS.out, loaded.config, loaded.variables["params"], loaded.step, extra)
    for path in files:
        print(f"{path.stat().st_size / 1e6:8.3f} MB  {path}")
    print(f"{sum(path.stat().st_size for path in files) / 1e6:8.3f} MB in all, of {FLAGS.workdir} step {loaded.step}")


if __name__ == "__main__":
    main(run)
