"""Rows on disk: tables of JSON lines, whatever they measure."""

import json

import pytest

from dllm.core.types import UserError
from dllm.evals.results import read_table


def rows(file):
    return [*read_table(file, lambda row: row["key"], "a row of this test").values()]


def test_rows_are_read_back_the_last_of_each_key(tmp_path):
    file = tmp_path / "rows.jsonl"
    assert rows(file) == []
    text = "".join(json.dumps({"key": key, "n": n}) + "\n" for n, key in enumerate("aba"))
    file.write_text(text + '{"key": "c", "n')  # a killed program's last line
    assert rows(file) == [{"key": "a", "n": 2}, {"key": "b", "n": 1}]


@pytest.mark.parametrize("line", ['{"other": 1}', '{"key": "a"', "3"])
def test_a_line_that_is_no_row_is_named(line, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"key": "a"}\n' + line + "\n")
    with pytest.raises(UserError, match=r"line 2 of .*rows.jsonl is not a row of this test: delete that line"):
        rows(file)


def test_a_file_that_cannot_be_read_is_a_line(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*: Is a directory; move it away, or make it readable"):
        rows(tmp_path)
