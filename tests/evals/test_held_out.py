"""The held-out text of a run: which chunks, of which split, from where."""

import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.data.corpus import decode
from dllm.evals.held_out import held_out

LETTERS = {"train": "abcd", "valid": "efgh", "test": "ijkl"}


def test_chunks(tmp_path):
    for split, letters in LETTERS.items():
        (tmp_path / f"{split}.txt").write_text("".join(4 * letter for letter in letters) + "zz")
    config = {"data": {"name": "text8", "path": "/none/text8", "length": 4}}
    texts = lambda *args: [decode(tokens_L) for tokens_L in held_out(config, str(tmp_path), *args)[1]]
    assert texts("valid") == ["eeee", "ffff", "gggg", "hhhh"]
    assert texts("valid", 2) == ["eeee", "gggg"]
    assert texts("test", 9) == ["iiii", "jjjj", "kkkk", "llll"]
    data, chunks_BL = held_out(config, str(tmp_path), "test", 1)
    assert (data.path, chunks_BL.shape, chunks_BL.dtype) == (str(tmp_path), (1, 4), np.uint8)
    with pytest.raises(UserError, match=r"cannot read /none/text8: .*; if the run's text lies elsewhere now, pass --data_path=PATH$"):
        held_out(config, None, "valid")
    with pytest.raises(UserError, match=r"a folder of parts$"):
        held_out(config, "/none/other", "valid")
