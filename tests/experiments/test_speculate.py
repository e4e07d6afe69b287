"""experiments/speculate.py: its tables and figure, how it goes on, and what it refuses."""

from __future__ import annotations

import json

import pytest

from dllm.train.run import run_config
from tests.experiments.conftest import save
from tests.experiments.programs import complaint, files
from tests.train import tiny

SHAPE = {"length": 48, "width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "head_width": 8, "mlp": 32}
UNO = SHAPE | {"name": "uno", "vocab": 27, "begins": True, "block": 4, "rank": 2, "alpha": 32.0}
SMALL = ("--lengths=3", "--length=3", "--num=4", "--given=3", "--new=10", "--batch=4", "--batches=2", "--replies=2,6", "--repetitions=1")


@pytest.fixture(scope="module")
def uno_run(place, tmp_path_factory):
    """A workdir with an adapter that says what the model says, of random weights, and what it logged. No test changes it."""
    changes = {"data__path": str(place / "text8"), "objective": {"name": "uno"}, "optim__train_only": "^lora/", "train__init_from": "base"}
    folder = save(tmp_path_factory.mktemp("uno") / "run", run_config(tiny.config(model=UNO, **changes)))
    logged = {"step": 1, "valid_accepted": 0.5, "valid_accept_1": 0.4, "valid_accept_4": 0.1}
    (folder / "metrics.jsonl").write_text(json.dumps(logged) + "\n")
    return folder


def read(out):
    return [json.loads(line) for line in (out / "speculation.jsonl").read_text().splitlines()]


def test_goes_on_where_it_was(uno_run, programs, tmp_path):
    """Half a line of a killed program is cut off, what is there isn't measured again, and the figure needs no run."""
    flags = (f"--out={tmp_path}", f"--workdir={uno_run}", "--tables=length", "--ways=chain", *SMALL)
    done = programs.run("speculate", *flags, "--drafters=adapter")
    assert done.code == 0, done.err
    first = read(tmp_path)
    assert [row["table"] for row in first] == ["acceptance", "length"]
    assert first[0]["accept"] == {"1": 0.4, "4": 0.1}
    assert (first[1]["model"], first[1]["step"]) == ("run", 1)
    assert 2 <= first[1]["tokens_per_cycle"] <= 4
    assert first[1]["cycles"] * first[1]["tokens_per_cycle"] == pytest.approx(40)
    with open(tmp_path / "speculation.jsonl", "a") as file:
        file.write('{"table": "len')
    done = programs.run("speculate", *flags, "--drafters=adapter,skip_bigram")
    assert done.code == 0, done.err
    assert "3 measurements, 2 of them there already" in done.out
    assert read(tmp_path)[:2] == first
    assert [row["setting"].get("drafter") for row in read(tmp_path)] == [None, "adapter", "skip_bigram"]
    for ending in ("png", "svg"):
        assert (tmp_path / f"speculation.{ending}").stat().st_size > 1000
        (tmp_path / f"speculation.{ending}").unlink()
    before = files(tmp_path)
    done = programs.run("speculate", f"--out={tmp_path}", "--plot")
    assert done.code == 0, done.err
    assert files(tmp_path).keys() - before.keys() == {tmp_path / "speculation.png", tmp_path / "speculation.svg"}
    assert (tmp_path / "speculation.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.slow
def test_all_tables(uno_run, programs, tmp_path):
    more = ("--each=1", "--permutations=19", "--paths=2", "--ceiling_num=2")
    done = programs.run("speculate", f"--out={tmp_path}", f"--workdir={uno_run}", *SMALL, *more)
    assert done.code == 0, done.err
    rows = read(tmp_path)
    of = lambda table: [row for row in rows if row["table"] == table]
    ways = ["chain", "block", "tree", "tree_rejection", "single_pass", "prompt_lookup"]
    assert [(row["setting"]["way"], row["setting"].get("drafter")) for row in of("length")] == [
        *((way, drafter) for way in ways[:4] for drafter in ("adapter", "unigram", "skip_bigram", "perfect")),
        ("single_pass", "adapter"),
        ("prompt_lookup", None),
    ]
    assert [row["setting"].get("way") for row in of("speed")] == ["autoregressive", "one", *ways, "adaptive", None]
    assert all(row["speedup"] > 0 and row["ms_per_token"] > 0 for row in of("speed")[:-1])
    assert of("speed")[0]["tokens_per_cycle"] == of("speed")[1]["tokens_per_cycle"] == 1
    assert [(row["setting"]["reply"], row["setting"]["way"]) for row in of("reply")] == [
        (reply, way) for reply in (2, 6) for way in ("autoregressive", "one", "chain", "adaptive")
    ]
    assert [row["setting"]["way"] for row in of("lossless")] == ["autoregressive", "one", *ways, "adaptive", "greedy", "risd_lossy"]
    assert all((row["greedy_mismatches"], row["greedy_prompts"]) == (0, 4) for row in of("lossless"))
    assert all(row["platform"] == "cpu" and row["config_hash"] for row in rows)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workdir="], "pass --workdir=RUN"),
        (["--workdir=PLACE/gpt"], "holds no adapter that drafts"),
        (["--workdir=PLACE/none"], "holds no checkpoint"),
        (["--tables=length,pace"], "--tables has 'pace'; there are: length, speed, reply, lossless"),
        (["--ways=forest"], "--ways has 'forest'; there are: chain, block,"),
        (["--drafters=oracle"], "--drafters has 'oracle'; there are: adapter, unigram,"),
        (["--lengths=1,4"], "--lengths is '1,4'; make it whole numbers of 2 or more"),
        (["--batches=some"], "--batches is 'some'"),
        (["--given=17"], "--given=17, and the rows of"),
        (["--num=100000"], "lower it"),
        (["--new=46"], "a prompt of 3 and 46 new tokens are 49, and the context of"),
        (["--replies=2,64"], "are 67, and the context of"),
        (["--lengths=9"], "a cycle of length 9 may write 10 tokens, and a reply has 10"),
        (["--data_path=PLACE/gone"], "gone"),
        (["--temperature=-1"], "temperature"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_what_it_refuses(uno_run, programs, place, tmp_path, flags, message):
    flags = [flag.replace("PLACE", str(place)) for flag in (f"--workdir={uno_run}", *SMALL, *flags)]
    assert message in complaint(programs.run("speculate", f"--out={tmp_path / 'new'}", *flags))
    assert not (tmp_path / "new").exists()


def test_nothing_to_draw(programs, tmp_path):
    assert "has no row to draw" in complaint(programs.run("speculate", f"--out={tmp_path}", "--plot"))
