"""A walk through bad input: whatever is wrong, a program ends with one line that names it and the mend, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import gzip
import json
import lzma
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.experiments.programs import POINT, SWEEP, complaint, config_text, files
from tests.train import tiny


@dataclasses.dataclass(frozen=True)
class Case:
    """`flags` and `says` may hold {place} (see the fixture), {tmp} (the test's own folder) and {new} (a path in it where nothing is).

    setup(tmp, place) makes what is wrong. `config` holds changes to the config file of train (dotted keys) or sweep; None deletes.
    """

    program: str
    flags: tuple[str, ...]
    says: tuple[str, ...]
    setup: Callable[[Path, Path], object] | None = None
    config: dict | None = None
    first: str = ""  # statements that the process runs before


def train(*flags, says, setup=None, config=None, workdir="{new}", first=""):
    return Case("train", (f"--workdir={workdir}", *flags), says, setup, config or {}, first)


def sample(*flags, says, setup=None, run="{place}/run", sampler="self_speculative"):
    return Case("sample", (f"--workdir={run}", f"--sampler={sampler}", "--num=2", "--out={new}/s.jsonl", *flags), says, setup)


def sweep(*flags, says, setup=None, config=None, run="{place}/run", out="{new}"):
    return Case("sweep", (f"--workdir={run}", f"--out={out}", *flags), says, setup, config or {})


def plot(*flags, says, setup=None, sweep="{place}/swept"):
    return Case("plot", (f"--sweep={sweep}", "--out={new}/p", *flags), says, setup)


def evaluate(*flags, says, setup=None, run="{place}/run"):
    return Case("evaluate", (f"--workdir={run}", *flags), says, setup)


def ranks(*flags, says, setup=None, run="{place}/run", out="{new}/r"):
    return Case("ranks", (f"--workdir={run}", f"--out={out}", *flags), says, setup)


def bench(*flags, says, setup=None, run="{place}/mdm", out="{new}"):
    return Case("bench_samplers", (f"--workdir={run}", f"--out={out}", *flags), says, setup)


def tune(*flags, says, setup=None, sweep="{place}/swept", out="{new}/p.json"):
    return Case("tune", (f"--sweep={sweep}", f"--out={out}", "--from_nfe=0", *flags), says, setup)


def release(*flags, says, setup=None, run="{place}/run", out="{new}"):
    return Case("release", (f"--workdir={run}", f"--out={out}", *flags), says, setup)


def write(name: str, data: bytes | str) -> Callable[[Path, Path], object]:
    """Returns a setup that writes a file."""
    return lambda tmp, _: (tmp / name).write_bytes(data.encode() if isinstance(data, str) else data)


def copied(change: Callable[[Path], object], what: str = "run") -> Callable[[Path, Path], object]:
    """Returns a setup that copies the run (or another folder) to {tmp}/copy and changes it."""
    return lambda tmp, place: change(Path(shutil.copytree(place / what, tmp / "copy")))


def truncate_arrays(item: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        for path in (run / "checkpoints" / "4" / item).rglob("d/*"):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return change


def edit_config(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Returns a change of the config in a run's last checkpoint."""

    def edit(run: Path) -> None:
        file = run / "checkpoints" / "4" / "config" / "metadata"
        config = json.loads(file.read_text())
        change(config)
        file.write_text(json.dumps(config))

    return edit


def edit_row(**values: object) -> Callable[[Path], None]:
    """Returns a change of the first row of a sweep."""

    def edit(out: Path) -> None:
        first, *rest = (out / "results.jsonl").read_text().splitlines()
        (out / "results.jsonl").write_text("".join(line + "\n" for line in (json.dumps(json.loads(first) | values), *rest)))

    return edit


def folder_in_place_of(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return change


def small_release(config: dict) -> Callable[[Path, Path], None]:
    """Returns a setup that makes {tmp}/small look like a release with this config."""

    def setup(tmp: Path, place: Path) -> None:
        (tmp / "small").mkdir()
        (tmp / "small" / "weights.npz").write_bytes(b"")
        (tmp / "small" / "config.json").write_text(json.dumps(config))

    return setup


def parts(*splits: str) -> Callable[[Path, Path], None]:
    def setup(tmp: Path, place: Path) -> None:
        (tmp / "parts").mkdir()
        for split in splits:
            (tmp / "parts" / f"{split}.txt").write_text(tiny.text(2000))

    return setup


def zipped(tmp: Path, place: Path) -> None:
    with zipfile.ZipFile(tmp / "t.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(place / "text8", "text8")
    (tmp / "t.zip").write_bytes((tmp / "t.zip").read_bytes()[:3000])


def point(sampler: str = "ancestral", options: object = None, settings: object = None) -> dict:
    return {"points": (POINT, {"sampler": sampler, "options": {} if options is None else options, "settings": settings or {}})}


FOUR_DEVICES = "import jax; jax.config.update('jax_num_cpu_devices', 4)"
LIKELIHOOD = "--evals=likelihood"
NOT_TEXT = gzip.compress(b"\xff\xfe")
DATA = "--config.data.path={tmp}/t"
CASES = {
    # the command line and the config file
    "unknown option": train("--nonsense=3", says=("'nonsense'", "--help")),
    "stray argument": train("steps=3", says=("unexpected argument 'steps=3'", "--name=value")),
    "no workdir": Case("train", ("--config={place}/config.py",), ("--workdir", "--help")),
    "no config": Case("train", ("--workdir={new}",), ("pass --config=configs/NAME.py",)),
    "config file missing": Case("train", ("--config={tmp}/no.py", "--workdir={new}"), ("{tmp}/no.py", "No such file")),
    "config file broken": Case(
        "train", ("--config={tmp}/c.py", "--workdir={new}"), ("{tmp}/c.py", "SyntaxError", "in line 1"), write("c.py", "def f(:")
    ),
    "config file without a config": Case(
        "train", ("--config={tmp}/c.py", "--workdir={new}"), ("{tmp}/c.py", "get_config", "must have"), write("c.py", "x = 3\n")
    ),
    "config file fails": Case(
        "train",
        ("--config={tmp}/c.py", "--workdir={new}"),
        ("{tmp}/c.py", "AttributeError", "'lr'", "in line 3"),
        write("c.py", "def get_config():\n    data = {}\n    return data.lr\n"),
    ),
    "unknown preset": Case("train", ("--config=configs/text8_ssmd.py:huge", "--workdir={new}"), ("'huge'", "there are: tiny, mini")),
    "preset of a config without": Case(
        "train", ("--config=configs/quickstart.py:mini", "--workdir={new}"), ("quickstart.py:mini", "get_config")
    ),
    "typo in an override": train("--config.train.step=5", says=("has no key step", "--config.KEY=VALUE")),
    "typo in an override's section": train("--config.trian.steps=5", says=("has no key trian",)),
    "text for an int": train("--config.train.steps=many", says=("--config.train.steps=many", "int")),
    "float for an int": train("--config.train.steps=2.5", says=("--config.train.steps=2.5", "int")),
    "text for a float": train("--config.optim.lr=fast", says=("--config.optim.lr=fast", "float")),
    "text for an int in the file": train(config={"train.steps": "5"}, says=("train.steps must be int, not '5'",)),
    "float for an int in the file": train(config={"train.batch": 8.0}, says=("train.batch must be int, not 8.0",)),
    "unknown key in the file": train(config={"model.widht": 16}, says=("unknown key model.widht; model has: ",)),
    "missing key": train(config={"optim.lr": None}, says=("missing key optim.lr (float)",)),
    "unknown section": train(config={"extra": {"a": 1}}, says=("unknown section extra", "there are: data, model")),
    "missing section": train(config={"mesh": None}, says=("section mesh is missing",)),
    # names
    "unknown model": train("--config.model.name=transformer", says=("'transformer'", "there are: ", "hybrid")),
    "unknown objective": train("--config.objective.name=elbo", says=("'elbo'", "there are: ", "ssmd")),
    "unknown data": train("--config.data.name=text9", says=("'text9'", "there are: ", "text8")),
    "unknown sampler in a config": train("--config.sampler.name=beam", says=("'beam'", "there are: ancestral")),
    # numbers
    "no steps": train("--config.train.steps=0", says=("train.steps is 0; it must be positive",)),
    "negative steps": train("--config.train.steps=-3", says=("train.steps is -3",)),
    "no batch": train("--config.train.batch=0", says=("train.batch is 0; it must be positive",)),
    "negative cadence": train("--config.train.save_every=-1", says=("train.save_every is -1; it must be 0 or more",)),
    "negative seed": train("--config.train.seed=-1", says=("train.seed is -1; it must be 0 or more",)),
    "length zero": train("--config.data.length=0", "--config.model.length=0", says=("length is 0",)),
    "lengths disagree": train("--config.data.length=8", says=("data.length is 8 and model.length 16; make them equal",)),
    "negative rate": train("--config.optim.lr=-1", says=("optim.lr is -1.0; it must be 0 or more",)),
    "rate nan": train("--config.optim.lr=nan", says=("optim.lr is nan",)),
    "negative warmup": train("--config.optim.warmup=-5", says=("optim.warmup is -5",)),
    "negative clip": train("--config.optim.clip=-1", says=("optim.clip is -1.0",)),
    "b2 of one": train("--config.optim.b2=1", says=("optim.b2 is 1.0; it must be 0 or more, below 1",)),
    "ema above one": train("--config.optim.ema=1.5", says=("optim.ema is 1.5; it must be between 0 and 1",)),
    "bad regular expression": train("--config.optim.train_only=(", says=("optim.train_only", "regular expression")),
    "nothing to train": train(
        "--config.optim.train_only=decoder", says=("optim.train_only='decoder' matches no parameter", "there are: causal/")
    ),
    "width and heads": train("--config.model.width=18", says=("model.width is 18; it must be a multiple of 4 x heads = 8",)),
    "no heads": train("--config.model.heads=0", says=("model.heads is 0; it must be positive",)),
    "negative n_causal": train("--config.model.n_causal=-1", says=("n_causal=-1",)),
    "vocabulary too small": train("--config.model.vocab=20", says=("model.vocab is 20", "27 symbols")),
    "unknown dtype": train("--config.model.dtype=int8", says=("model.dtype is 'int8'", "'float32' or 'bfloat16'")),
    "mesh too large": train("--config.mesh.data=3", says=("mesh 3 x 1 x 1 wants 3 devices, there are 1; set mesh.data=-1",)),
    "mesh of size zero": train("--config.mesh.fsdp=0", says=("mesh sizes must be positive",)),
    "batch and devices": train(
        "--config.mesh.data=4", "--config.train.batch=6", says=("train.batch=6 must be a multiple", "= 4"), first=FOUR_DEVICES
    ),
    "mesh and devices": train(
        "--config.mesh.data=-1", "--config.mesh.fsdp=3", says=("mesh.fsdp x mesh.tensor = 3 doesn't divide the 4",), first=FOUR_DEVICES
    ),
    "sampler's window in a config": train("--config.sampler.window=square", says=("'square'", "cosine, linear, constant")),
    # data
    "no data": train(DATA, says=("cannot read {tmp}/t: No such file", "data.path")),
    "empty file": train(DATA, says=("{tmp}/t has 0 characters", "data.length"), setup=write("t", "")),
    "shorter than a sequence": train(DATA, says=("split of {tmp}/t has", "data.length = 16"), setup=write("t", "abc " * 8)),
    "shorter than a batch": train(DATA, says=("not one batch of 8", "smaller batch"), setup=write("t", "abc " * 100)),
    "foreign characters": train(
        DATA, says=("{tmp}/t has b'A' at offset 4000", "only a-z and space"), setup=write("t", "abc " * 1000 + "A")
    ),
    "truncated xz": train(DATA, says=("{tmp}/t is damaged or cut off",), setup=write("t", lzma.compress(tiny.text().encode())[:2000])),
    "truncated zip": train("--config.data.path={tmp}/t.zip", says=("{tmp}/t.zip is damaged or cut off",), setup=zipped),
    "folder without parts": train("--config.data.path={tmp}/parts", says=("{tmp}/parts has no train part",), setup=parts()),
    "folder without a split": train("--config.data.path={tmp}/parts", says=("has no test part", "test*"), setup=parts("train", "valid")),
    "pydocs with a path": train("--config.data.name=pydocs", says=("pydocs reads no file", "data.name=text8")),
    "negative lexicon": train("--config.data.lexicon=-2", says=("data.lexicon is -2",)),
    "lexicon beyond the text": train("--config.data.lexicon=1000", says=("data.lexicon is 1000", "different words", "smaller number")),
    # workdirs and checkpoints
    "workdir is a file": train(workdir="{tmp}/f", says=("{tmp}/f", "choose another"), setup=write("f", "")),
    "workdir cannot be made": train(workdir="/proc/none/run", says=("/proc/none/run", "choose another")),
    "another architecture": train(
        "--config.model.width=32", workdir="{place}/run", says=("{place}/run holds a run with model.width=16, not 32", "another --workdir")
    ),
    "another optimizer": train("--config.optim.lr=0.5", workdir="{place}/run", says=("optim.lr=0.01, not 0.5",)),
    "config.json is garbage": train(
        workdir="{tmp}/copy", says=("copy/config.json is not JSON",), setup=copied(lambda run: (run / "config.json").write_bytes(b"{\xff"))
    ),
    "config.json is no config": train(
        workdir="{tmp}/copy",
        says=("copy/config.json is not a run's config",),
        setup=copied(lambda run: (run / "config.json").write_text("[]")),
    ),
    "checkpoint's arrays cut off": train(
        workdir="{tmp}/copy", says=("checkpoints/4 is damaged", "move that folder away"), setup=copied(truncate_arrays("train"))
    ),
    "metrics are garbage": train(
        workdir="{tmp}/copy",
        says=("line 1 of", "metrics.jsonl is not a row", "delete that line"),
        setup=copied(lambda run: (run / "metrics.jsonl").write_text("{\n" + (run / "metrics.jsonl").read_text())),
    ),
    "init_from nowhere": train("--config.train.init_from={tmp}/no", says=("{tmp}/no holds no checkpoint",)),
    "init_from a stranger": train(
        "--config.train.init_from={place}/gpt", "--config.model.width=32", says=("train.init_from={place}/gpt", "none of its parameters")
    ),
    # sampling
    "no run": sample(run="{tmp}/no", says=("{tmp}/no holds no checkpoint", "--workdir")),
    "no such step": sample("--step=3", says=("no checkpoint of step 3; there are: 2, 4",)),
    "no whole checkpoint": sample(
        run="{tmp}/copy",
        says=("copy holds no checkpoint",),
        setup=copied(lambda run: [shutil.rmtree(run / "checkpoints" / step / "ema") for step in ("2", "4")]),
    ),
    "arrays cut off": sample(run="{tmp}/copy", says=("checkpoints/4 is damaged",), setup=copied(truncate_arrays("ema"))),
    "checkpoint's config is garbage": sample(
        run="{tmp}/copy",
        says=("checkpoints/4 is damaged",),
        setup=copied(lambda run: (run / "checkpoints/4/config/metadata").write_text("{")),
    ),
    "checkpoint's config is another": sample(
        run="{tmp}/copy",
        says=("checkpoints/4 is damaged", "move that folder away"),
        setup=copied(lambda run: (run / "checkpoints/4/config/metadata").write_text('{"data": {}}')),
    ),
    "unknown sampler": sample(sampler="beam", says=("'beam'", "there are: ancestral")),
    "unknown sampler option": sample("--option.depth=2", says=("no --option.depth", "there are: window")),
    "unknown setting": sample("--setting.heat=2", says=("no --setting.heat", "there are: temperature")),
    "option of another sampler": sample("--option.n_verify=2", sampler="ancestral", says=("unknown key ancestral.option.n_verify",)),
    "text for an option": sample("--option.rate=slow", says=("--option.rate=slow", "float")),
    "unknown window": sample("--option.window=square", says=("'square'", "cosine, linear, constant")),
    "window of rate 0": sample("--option.rate=0", says=("0 < rate <= 1", "got 0.0")),
    "rate above 1": sample("--option.rate=1.5", says=("0 < rate <= 1", "got 1.5")),
    "rate nan (sampling)": sample("--option.rate=nan", says=("0 < rate <= 1", "got nan")),
    "constant window 0": sample("--option.rate=0", "--option.window=constant", says=("rate >= 1", "got 0.0")),
    "constant window nan": sample("--option.rate=nan", "--option.window=linear", says=("rate >= 1", "got nan")),
    "no verification": sample("--option.n_verify=0", says=("n_verify must be 1 or more, got 0",)),
    "unknown verification": sample("--option.verification=tree", says=("verification", "'tree'", "chain", "block")),
    "long prompt": sample("--prompt=a prompt that is too long", says=("the prompt has 25 tokens", "context is 16", "shorten it")),
    "foreign prompt": sample("--prompt=The end", says=("the prompt has 'T' at offset 0", "only a-z and space")),
    "no samples": sample("--num=0", says=("at least 1, not 0",)),
    "no batch to sample": sample("--batch=0", says=("at least 1, not 2 and 0",)),
    "negative temperature": sample("--setting.temperature=-1", says=("setting temperature must be 0 or more, got -1.0",)),
    "temperature nan": sample("--setting.temperature=nan", says=("setting temperature must be 0 or more, got nan",)),
    "top_p 0": sample("--setting.top_p=0", says=("setting top_p must be above 0, at most 1, got 0.0",)),
    "top_p above 1": sample("--setting.top_p=1.5", says=("setting top_p must be above 0",)),
    "negative top_k": sample("--setting.top_k=-1", says=("setting top_k must be 0 (off) or more, got -1",)),
    "min_p 1": sample("--setting.min_p=1", says=("setting min_p must be",)),
    "all characters banned": sample("--setting.banned=abcdefghijklmnopqrstuvwxyz ", says=("banned leaves no token",)),
    "foreign characters banned": sample("--setting.banned=A", says=("setting banned has 'A' at offset 0",)),
    "stop in any order": sample("--setting.stop=a", says=("stop", "left-to-right", "drop the setting")),
    "negative max_new": sample("--setting.max_new=-1", run="{place}/gpt", sampler="autoregressive", says=("max_new must be 1 or more",)),
    "infilling from left to right": sample("--prompt=a?b", run="{place}/gpt", sampler="autoregressive", says=("takes a prefix",)),
    "autoregressive on a hybrid": sample(sampler="autoregressive", says=("autoregressive doesn't go with the model hybrid",)),
    "ancestral on a gpt": sample(sampler="ancestral", run="{place}/gpt", says=("ancestral doesn't go with the model gpt",)),
    "nothing to verify with": sample(run="{place}/mdm", says=("n_causal=0", "ancestral or confidence")),
    "samples to no place": sample("--out={tmp}/f/s.jsonl", says=("{tmp}/f", "choose another place"), setup=write("f", "")),
    # sweeps
    "no points": sweep(config={"points": ()}, says=("config.points is ()", "one or more")),
    "no evals": sweep(config={"evals": ()}, says=("config.evals is ()", "one or more")),
    "the same point twice": sweep(config=point(options={"rate": 0.5}), says=("points[0]", "points[1]", "one row")),
    "one run twice": sweep("--workdir={place}/run", says=("points[0]", "one row")),
    "nothing to sample": sweep(config={"num_samples": 0}, says=("config.num_samples is 0; it must be positive",)),
    "unknown key of a point": sweep(config={"points": ({"sampler": "ancestral"},)}, says=("missing key config.points[0].options",)),
    "options are no mapping": sweep(config=point(options=3), says=("config.points[1].options must be dict, not 3",)),
    "unknown sampler in a sweep": sweep(config=point("beam"), says=("'beam'", "there are: ancestral")),
    "rate 0 in a sweep": sweep(config=point(options={"rate": 0.0}), says=("0 < rate <= 1", "got 0.0")),
    "setting in a sweep": sweep(config=point(settings={"top_p": 2.0}), says=("setting top_p must be",)),
    "unknown eval": sweep(config={"evals": ("fluency",)}, says=("'fluency'", "there are: ", "gen_nll")),
    "no judge": sweep(config={"evals": ("gen_nll",)}, says=("gen_nll needs a trained gpt run", "judge")),
    "judge of another vocabulary": sweep(
        config={"evals": ("gen_nll",), "judge": "{place}/gpt_20"}, says=("the judge knows 20 symbols", "use a judge of the same data")
    ),
    "judge is no gpt": sweep(config={"evals": ("gen_nll",), "judge": "{place}/mdm"}, says=("judge", "gpt")),
    "no words": sweep(
        run="{tmp}/copy", says=("cannot read {tmp}/copy/words.txt.gz",), setup=copied(lambda run: (run / "words.txt.gz").unlink())
    ),
    "words are garbage": sweep(
        run="{tmp}/copy",
        says=("cannot read {tmp}/copy/words.txt.gz",),
        setup=copied(lambda run: (run / "words.txt.gz").write_bytes(b"\x1f")),
    ),
    "bound of samples": sweep(
        config={"evals": ("spelling", "bound")},
        says=("config.evals has bound, which scores held-out text and not samples: drop it", "evaluate.py --evals=bound"),
    ),
    "likelihood of samples": sweep(config={"evals": ("likelihood",)}, says=("config.evals has likelihood", "--evals=likelihood")),
    "negative seed of a sweep": sweep(config={"seed": -1}, says=("config.seed is -1; it must be 0 or more",)),
    "results are a folder": sweep(
        out="{tmp}/copy",
        says=("cannot write {tmp}/copy/results.jsonl: Is a directory; move it away",),
        setup=copied(folder_in_place_of("results.jsonl"), "swept"),
    ),
    "out is a file": sweep(out="{tmp}/f", says=("--out={tmp}/f", "choose another place"), setup=write("f", "")),
    "a row is garbage": sweep(
        out="{tmp}/copy",
        says=("line 1 of {tmp}/copy/results.jsonl is not a sweep row: delete that line",),
        setup=copied(lambda out: (out / "results.jsonl").write_bytes(b"\xff{\n" + (out / "results.jsonl").read_bytes()), "swept"),
    ),
    # plots
    "no sweep": plot(sweep="{tmp}", says=("no results in {tmp}", "--sweep takes the --out")),
    "no such metric": plot("--y=gen_nll", says=("has no metric gen_nll; it has: spelling",)),
    "no number to plot": plot("--y=sampler", says=("has no metric sampler; it has: spelling",)),
    "no such axis": plot("--x=seconds", says=("--x=seconds", "nfe")),
    "no such sampler": plot("--samplers=beam", says=("'beam'; there are: ancestral",)),
    "arrays are missing": plot(
        sweep="{tmp}/copy", says=("samples/", "sweep again"), setup=copied(lambda out: shutil.rmtree(out / "samples"), "swept")
    ),
    "reference is garbage": plot(
        sweep="{tmp}/copy",
        says=("reference.json is not JSON",),
        setup=copied(lambda out: (out / "reference.json").write_text("{"), "swept"),
    ),
    # evaluation: the run
    "no run to evaluate": evaluate(run="{tmp}/no", says=("{tmp}/no holds no checkpoint; pass the --workdir of a training run",)),
    "an empty folder to evaluate": evaluate(run="{tmp}", says=("{tmp} holds no checkpoint",)),
    "no such step to evaluate": evaluate("--step=3", says=("{place}/run has no checkpoint of step 3; there are: 2, 4",)),
    "arrays cut off (evaluate)": evaluate(run="{tmp}/copy", says=("checkpoints/4 is damaged",), setup=copied(truncate_arrays("ema"))),
    "unknown objective in a checkpoint": evaluate(
        run="{tmp}/copy",
        says=("'elbo'", "there are: ", "ssmd"),
        setup=copied(edit_config(lambda config: config.update(objective={"name": "elbo"}))),
    ),
    "no sampler in a checkpoint": evaluate(
        LIKELIHOOD,
        "--option.verification=block",
        run="{tmp}/copy",
        says=("--option.verification=chain",),
        setup=copied(edit_config(lambda config: config.pop("sampler"))),
    ),
    "a release without data": evaluate(
        run="{tmp}/small", says=("{tmp}/small/config.json has no section data: restore",), setup=small_release({"model": {}})
    ),
    # evaluation: what is measured
    "unknown eval to evaluate": evaluate("--evals=fluency", says=("'fluency'", "there are: bound, entropy, gen_nll")),
    "a module that is no eval": evaluate("--evals=bound,ranks", says=("'ranks'", "there are: bound")),
    "nothing to evaluate": evaluate("--evals=", says=("--evals names nothing", "--evals=bound")),
    "unknown split": evaluate("--split=train", says=("--split=train", "valid|test")),
    "negative number of chunks": evaluate("--num=-1", says=("--num=-1", "non-negative")),
    "text for a number of chunks": evaluate("--num=many", says=("--num=many", "int")),
    "negative seed of an estimator": evaluate("--seed=-1", says=("--seed=-1", "[0, 4294967295]")),
    "seed beyond an int": evaluate("--seed=99999999999999999999", says=("--seed=99999999999999999999", "[0, 4294967295]")),
    "unknown option of likelihood": evaluate(LIKELIHOOD, "--option.depth=2", says=("'option.depth'", "--help")),
    "options for another eval": evaluate("--option.rate=0.5", says=("--option.KEY=VALUE is for the eval likelihood", "--evals")),
    "judge for another eval": evaluate("--judge={place}/gpt", says=("--judge is for the eval gen_nll", "--evals")),
    "text for an option of likelihood": evaluate(LIKELIHOOD, "--option.rate=slow", says=("--option.rate=slow", "float")),
    "float for an option of likelihood": evaluate(LIKELIHOOD, "--option.n_verify=2.5", says=("--option.n_verify=2.5", "int")),
    "likelihood at rate 0": evaluate(LIKELIHOOD, "--option.rate=0", says=("0 < rate <= 1", "got 0.0")),
    "likelihood in a window of 0": evaluate(LIKELIHOOD, "--option.window=constant", "--option.rate=0", says=("rate >= 1", "got 0.0")),
    "likelihood in no window": evaluate(LIKELIHOOD, "--option.window=square", says=("'square'", "cosine, linear, constant")),
    "likelihood without verification": evaluate(LIKELIHOOD, "--option.n_verify=0", says=("n_verify must be 1 or more, got 0",)),
    "unknown verification of likelihood": evaluate(
        LIKELIHOOD, "--option.verification=tree", says=("option.verification", "'tree'", "chain")
    ),
    "likelihood of blocks": evaluate(LIKELIHOOD, "--option.verification=block", says=("not block", "--option.verification=chain")),
    "likelihood of a gpt": evaluate(LIKELIHOOD, run="{place}/gpt", says=("likelihood", "n_causal > 0", "--evals=bound")),
    "likelihood without causal layers": evaluate(LIKELIHOOD, run="{place}/mdm", says=("likelihood", "n_causal > 0", "--evals=bound")),
    "no judge to evaluate with": evaluate("--evals=gen_nll", says=("gen_nll needs a trained gpt run", "judge")),
    "no run as a judge": evaluate("--evals=gen_nll", "--judge={tmp}/no", says=("{tmp}/no holds no checkpoint",)),
    "judge is no gpt (evaluate)": evaluate("--evals=gen_nll", "--judge={place}/mdm", says=("judge", "gpt run")),
    # evaluation: the text, and where the figures go
    "the run's text is gone": evaluate(
        run="{tmp}/copy",
        says=("cannot read /none/text8: No such file", "--data_path"),
        setup=copied(edit_config(lambda config: config["data"].update(path="/none/text8"))),
    ),
    "no text at data_path": evaluate("--data_path={tmp}/t", says=("cannot read {tmp}/t: No such file",)),
    "too short a text at data_path": evaluate("--data_path={tmp}/t", says=("{tmp}/t has 0 characters",), setup=write("t", "")),
    "no words to evaluate with": evaluate(
        "--evals=spelling",
        run="{tmp}/copy",
        says=("cannot read {tmp}/copy/words.txt.gz", "train again"),
        setup=copied(lambda run: (run / "words.txt.gz").unlink()),
    ),
    "words are no text": evaluate(
        "--evals=spelling",
        run="{tmp}/copy",
        says=("cannot read {tmp}/copy/words.txt.gz", "train again"),
        setup=copied(lambda run: (run / "words.txt.gz").write_bytes(NOT_TEXT)),
    ),
    "figures are a folder": evaluate(
        run="{tmp}/copy",
        says=("cannot write {tmp}/copy/evals.jsonl: Is a directory; move it away",),
        setup=copied(folder_in_place_of("evals.jsonl")),
    ),
    # ranks
    "ranks of a gpt": ranks(run="{place}/gpt", says=("no causal layers", "workdir of a hybrid run")),
    "ranks without causal layers": ranks(run="{place}/mdm", says=("no causal layers", "workdir of a hybrid run")),
    "a start beyond the end": ranks("--starts=0,16", says=("can't start at rank 16; ranks go from 0 to 15",)),
    "text for a start": ranks("--starts=0,a", says=("--starts=0,a must be whole numbers",)),
    "no text for ranks": ranks("--data_path={tmp}/t", says=("cannot read {tmp}/t: No such file",)),
    "ranks to no place": ranks(out="{tmp}/f/r", says=("{tmp}/f", "choose another place"), setup=write("f", "")),
    # times
    "no run to time": bench(run="{tmp}/no", says=("{tmp}/no holds no checkpoint",)),
    "unknown sampler to time": bench("--sampler=beam", says=("no sampler 'beam'", "there are: ancestral, confidence")),
    "no batch to time": bench("--batch=0", says=("--batch=0", "positive")),
    "negative seed of times": bench("--seed=-1", says=("--seed=-1", "[0, 4294967295]")),
    "times are a folder": bench(
        out="{tmp}/copy",
        says=("cannot write {tmp}/copy/bench.jsonl: Is a directory; move it away",),
        setup=copied(folder_in_place_of("bench.jsonl"), "swept"),
    ),
    # tuning
    "nothing to tune": tune(sweep="{tmp}", says=("no results in {tmp}", "--sweep takes the --out")),
    "no bins": tune("--num=0", says=("--num=0", "positive")),
    "no such metric to tune": tune("--y=fluency", says=("no row has a value of fluency; there are: ", "spelling")),
    "tuned by no number": tune("--y=sampler", says=("no row has a value of sampler; there are: ", "spelling")),
    "too many passes": tune("--from_nfe=1000", says=("spelling at 1000 passes or more", "lower --from_nfe")),
    "a row's passes are text": tune(
        sweep="{tmp}/copy",
        says=("line 1 of {tmp}/copy/results.jsonl is not a sweep row: delete that line",),
        setup=copied(edit_row(nfe="few"), "swept"),
    ),
    "a row's setting is a list": tune(
        sweep="{tmp}/copy", says=("line 1 of", "is not a sweep row"), setup=copied(edit_row(setting=[3]), "swept")
    ),
    "results to tune are a folder": tune(
        sweep="{tmp}/copy",
        says=("cannot read {tmp}/copy/results.jsonl: Is a directory",),
        setup=copied(folder_in_place_of("results.jsonl"), "swept"),
    ),
    "points to no place": tune(out="{tmp}/f/p.json", says=("{tmp}/f", "choose another place"), setup=write("f", "")),
    # releases
    "no run to release": release(run="{tmp}/no", says=("{tmp}/no holds no checkpoint",)),
    "no such step to release": release("--step=3", says=("no checkpoint of step 3; there are: 2, 4",)),
    "release into a run": release(out="{place}/run", says=("{place}/run holds a training run", "a folder of its own")),
    "release to no place": release(out="{tmp}/f", says=("{tmp}/f", "choose another place"), setup=write("f", "")),
    "release without words": release(
        run="{tmp}/copy", says=("cannot read {tmp}/copy/words.txt.gz",), setup=copied(lambda run: (run / "words.txt.gz").unlink())
    ),
    "release of damage": release(run="{tmp}/copy", says=("checkpoints/4 is damaged",), setup=copied(truncate_arrays("ema"))),
}


def command(case: Case, tmp: Path, place: Path) -> list[str]:
    """Returns the case's flags; writes its config file to `tmp`."""
    fill = lambda text: text.format(tmp=tmp, place=place, new=tmp / "new")
    flags = [fill(flag) for flag in case.flags]
    if case.config is None or any(flag.startswith("--config=") for flag in flags):
        return flags
    values = json.loads((place / "config.json").read_text()) if case.program == "train" else dict(SWEEP)
    for key, value in case.config.items():
        section, _, name = key.partition(".")
        at, name = (values[section], name) if name else (values, section)
        at[name] = fill(value) if isinstance(value, str) else value
        if value is None:
            del at[name]
    (tmp / "config.py").write_text(config_text(values))
    return [f"--config={tmp / 'config.py'}", *flags]


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_bad_input(case, programs, place, tmp_path):
    if case.setup:
        case.setup(tmp_path, place)
    flags = command(case, tmp_path, place)
    before = files(tmp_path, place)
    line = complaint(programs.run(case.program, *flags, first=case.first))
    for piece in case.says:
        assert piece.format(tmp=tmp_path, place=place, new=tmp_path / "new") in line
    after = files(tmp_path, place)
    assert after == before, sorted(map(str, {**before, **after}.items() ^ before.items()))[:5]


def test_what_a_later_eval_refuses_shows_first(programs, place, tmp_path):
    """Before the first of them, which may take hours, is measured."""
    before = files(place)
    done = programs.run("evaluate", f"--workdir={place / 'run'}", "--evals=entropy,likelihood", "--option.rate=0")
    assert "0 < rate <= 1" in complaint(done)
    assert "entropy" not in done.out
    assert files(place) == before
