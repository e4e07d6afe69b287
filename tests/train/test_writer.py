from __future__ import annotations

import io
import json

from dllm.train.writer import Writer, clock


class Terminal(io.StringIO):
    def isatty(self):
        return True


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_whole_and_shown(tmp_path):
    path, out = tmp_path / "metrics.jsonl", io.StringIO()
    log = Writer(path, 0, 10, 64, stream=out)
    log.train(1, {"loss": 2.0, "grad_norm": 1.0})
    log.close()
    (row,) = lines(path)
    assert list(row) == ["step", "loss", "grad_norm", "tokens_per_s", "seconds"]
    assert row["step"] == 1
    assert row["tokens_per_s"] > 0
    assert out.getvalue().startswith("step 1/10  loss 2  grad_norm 1  ")
    assert "tokens/s" in out.getvalue()


def test_going_on_drops_later_rows_and_half_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s, "seconds": float(s)}) + "\n" for s in (1, 2, 3, 4)) + '{"step": 5, "lo')
    log = Writer(path, 2, 10, 64, stream=io.StringIO())
    assert lines(path) == [{"step": 1, "seconds": 1.0}, {"step": 2, "seconds": 2.0}]
    log.train(3, {"loss": 1.0})
    log.close()
    assert [row["step"] for row in lines(path)] == [1, 2, 3]
    assert 2.0 <= lines(path)[-1]["seconds"] < 2.5, "the run's seconds go on"


def test_time_aside_is_not_training(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    log = Writer(tmp_path / "metrics.jsonl", 0, 10, 64, stream=io.StringIO())
    now[0] = 1.0
    with log.aside(1):
        now[0] = 100.0
    now[0] = 102.0
    log.train(3, {"loss": 1.0})
    log.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 3, "loss": 1.0, "tokens_per_s": 64.0, "seconds": 3.0}]


def test_a_terminal_gets_one_live_line(tmp_path):
    out = Terminal()
    log = Writer(tmp_path / "metrics.jsonl", 0, 10, 64, stream=out)
    log.train(1, {"loss": 1.23456})
    log.train(2, {"loss": 1.0})
    log.show("done")
    log.close()
    assert out.getvalue().count("\n") == 1
    assert out.getvalue().count("\r") == 3


def test_a_silent_writer_leaves_nothing(tmp_path):
    log = Writer(tmp_path / "metrics.jsonl", 0, 10, 64, silent=True, stream=(out := io.StringIO()))
    log.train(1, {"loss": 1.0})
    log.close()
    assert out.getvalue() == ""
    assert not (tmp_path / "metrics.jsonl").exists()


def test_clock():
    assert [clock(s) for s in (5, 65, 3725)] == ["0:05", "1:05", "1:02:05"]
