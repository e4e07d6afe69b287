"""The metrics of proteins: by hand, against brute force, and what a folding command can get wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.data.tokenizers import CHARACTERS, Residues
from dllm.evals import protein
from dllm.evals.stats import Context, Metric, bootstrap_ratios, bootstrap_weights, exp_metric
from dllm.models import esm2, gpt
from tests.models.test_decoder import shaken

TOKENS = ("<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>")
RESIDUES = Residues(TOKENS, 33, 0, 2, 32)
SEQUENCES = ["MKVLAAGG", "ACD", "", "WWYV" * 12]
REPO = Path(__file__).parents[2]


def rows(sequences, length=64):
    """Returns tokens [B, length] as a model writes them: <cls>, residues, <eos>, padding."""
    tokens_BL = np.full((len(sequences), length), 1)
    for row_L, sequence in zip(tokens_BL, sequences):
        ids = RESIDUES.encode(f"<cls>{sequence}<eos>")
        row_L[: len(ids)] = ids
    return tokens_BL


def judge_of(module, config, tokenizer=RESIDUES):
    variables = {"params": shaken(module.init(config, jax.random.key(0))["params"])}
    return types.SimpleNamespace(model_module=module, model_config=config, variables=variables, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def judge():
    return judge_of(esm2, esm2.Config(length=64, width=16, n_noncausal=1, heads=2, mlp=24))


def test_repeats_by_hand():
    inside = lambda sequence: "".join("x" if yes else "." for yes in protein.repeated(sequence))
    assert inside("MAAAK") == "....."  # three of a kind are no stretch of 4
    assert inside("MAAAAK") == ".xxxx."
    assert inside("GSGSG") == "....."  # five, and 3 x 2 are wanted
    assert inside("GSGSGSK") == "xxxxxx."
    assert inside("ACDACDACDW") == "xxxxxxxxx."
    assert inside("AAAAGSGSGS") == "x" * 10
    assert inside("") == ""
    assert not protein.repeated("ACDEFGHIKLMNPQRSTVWY").any()


def test_divergence_is_jensen_shannons():
    real, written = ["ACDA", "CCDDA"], ["AAAC", "WDA", ""]
    for k in (1, 2):
        mers_of = lambda sequences, k=k: [s[i : i + k] for s in sequences for i in range(len(s) - k + 1)]
        mers = sorted({*mers_of(real), *mers_of(written)})
        count = lambda sequences, mers=mers, of=mers_of: np.array([of(sequences).count(mer) for mer in mers], float)
        f, g = (x / x.sum() for x in (count(written), count(real)))
        m = (f + g) / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            expect = 0.5 * (np.nansum(f * np.log(f / m)) + np.nansum(g * np.log(g / m)))
        assert protein.divergence(written, real, k).value == pytest.approx(expect, rel=1e-12)
    assert protein.divergence(real, real[::-1], 2).value == pytest.approx(0, abs=1e-12)
    assert protein.divergence(["AAA"], ["CCC"], 1).value == pytest.approx(np.log(2))
    assert protein.divergence(["XB"], ["ZU"], 1).value == pytest.approx(0)  # any other letter is one kind
    with pytest.raises(UserError, match="no held-out sequence has 3 residues"):
        protein.divergence(["ACD"], ["AC"], 3)


def test_stderr_of_a_divergence_is_what_the_bootstrap_says():
    """By counting anew in each replicate, not by the ratio: so the slope is tested too."""
    rng = np.random.default_rng(0)
    draw = lambda shares, n: ["".join(rng.choice(list("ACDW"), size=int(rng.integers(20, 60)), p=shares)) for _ in range(n)]
    written, real = draw([0.4, 0.3, 0.2, 0.1], 60), draw([0.1, 0.2, 0.3, 0.4], 200)
    metric = protein.divergence(written, real, 1)
    again = [protein.divergence([written[i] for i in rng.integers(60, size=60)], real, 1).value for _ in range(200)]
    assert metric.stderr == pytest.approx(np.std(again), rel=0.25)


def test_stderr_of_an_exponential_is_the_delta_methods():
    metric = Metric(np.array([3.0, 8.0, 2.0]), np.array([2.0, 3.0, 1.5]))
    found = exp_metric(metric)
    assert found.value == pytest.approx(np.exp(metric.value))
    assert found.stderr == pytest.approx(found.value * metric.stderr)
    weights_RB = bootstrap_weights(np.random.default_rng(0), 4, 3)
    np.testing.assert_allclose(np.log(bootstrap_ratios(found, weights_RB)), bootstrap_ratios(metric, weights_RB), atol=0.5)


def test_pseudo_likelihood_against_one_forward_a_position(judge, monkeypatch):
    monkeypatch.setattr(protein, "POSITIONS", 48)  # of none fewer than all
    found = protein.pseudo_nats(judge, SEQUENCES, 0)
    forward = jax.jit(
        lambda x: esm2.bind(judge.model_config, judge.variables).both(x, jnp.arange(x.shape[1])[None], x[:, 0] * 0 + x.shape[1])[0]
    )
    for sequence, nats in zip(SEQUENCES[:3], found):
        ids, expect = RESIDUES.encode(f"<cls>{sequence}<eos>"), 0.0
        for at in range(1, len(ids) - 1):
            masked = [*ids[:at], 32, *ids[at + 1 :]]
            expect -= float(jax.nn.log_softmax(forward(jnp.array([masked], jnp.int32))[0, at])[ids[at]])
        assert nats == pytest.approx(expect, rel=1e-4)
    assert found[2] == 0


def test_positions_are_each_as_likely_and_the_estimate_is_near(judge, monkeypatch):
    counts = np.zeros(45)
    for seed in range(2000):
        some = protein._strata(45, np.random.default_rng(seed))
        assert len(set(some.tolist())) == protein.POSITIONS
        counts[some] += 1
    share = protein.POSITIONS / 45
    assert np.abs(counts / 2000 - share).max() < 4.5 * np.sqrt(share * (1 - share) / 2000)  # false alarm: 45 x 7e-6
    assert protein._strata(7, np.random.default_rng(0)).tolist() == [*range(7)]
    estimates = [protein.pseudo_nats(judge, SEQUENCES[3:], seed)[0] for seed in range(4)]
    monkeypatch.setattr(protein, "POSITIONS", 48)
    exact = protein.pseudo_nats(judge, SEQUENCES[3:], 0)[0]
    assert exact != pytest.approx(estimates[0], rel=1e-6)
    assert np.mean(estimates) == pytest.approx(exact, rel=0.05)


def test_all_metrics_of_mixed_lengths(judge):
    context = Context(tokenizer=RESIDUES, held_out=rows(["MKVLAAGG", "MSTNPKPQRK"]), judge=judge)
    tokens_BL = rows(SEQUENCES)
    found = protein.evaluate(tokens_BL, np.full(4, 64), context)
    assert set(found) == {"pseudo_nll", "pseudo_perplexity", "composition_js", "kmer_js", "repeats", "residues"}
    assert found["residues"].numerator_B.tolist() == [8, 3, 0, 48]
    assert found["repeats"].value == pytest.approx(48 / 59)
    assert found["pseudo_perplexity"].value == pytest.approx(np.exp(found["pseudo_nll"].value))
    assert all(np.isfinite(metric.stderr) for metric in found.values())
    alone = protein.evaluate(tokens_BL[:1], np.full(1, 64), context)["pseudo_nll"]
    assert alone.numerator_B[0] == pytest.approx(found["pseudo_nll"].numerator_B[0], rel=1e-4)
    assert "pseudo_nll" not in protein.evaluate(tokens_BL, np.full(4, 64), Context(tokenizer=RESIDUES, held_out=context.held_out))


def test_a_judge_that_cannot_score(judge):
    other = judge_of(gpt, gpt.Config(length=12, width=16, layers=1, heads=2, mlp=32), CHARACTERS)
    with pytest.raises(UserError, match="must be a masked model of proteins, with padding: set `judge` to an esm2's workdir"):
        protein.pseudo_nats(other, SEQUENCES, 0)
    with pytest.raises(UserError, match="the judge reads 62 residues, a sequence has 63"):
        protein.pseudo_nats(judge, ["A" * 63], 0)
    with pytest.raises(UserError, match="the metric protein needs held-out sequences"):
        protein.evaluate(rows(["A"]), np.array([64]), Context(tokenizer=RESIDUES))


PROGRAM = """
import sys
fasta, out, how = sys.argv[1:]
names = [line[1:].strip() for line in open(fasta) if line.startswith(">")]
lengths = [len(line.strip()) for line in open(fasta) if not line.startswith(">")]
lines = ["id,plddt"] + [f"{name},{50 + length}" for name, length in zip(names, lengths)]
if how == "dies":
    print("first"), sys.exit("out of memory")
lines = {"short": lines[:-1], "nan": lines[:-1] + [names[-1] + ",nan"], "text": lines[:-1] + [names[-1] + ",good"],
         "high": lines[:-1] + [names[-1] + ",101"], "twice": lines + lines[-1:], "stranger": lines + ["x,3"],
         "columns": ["name,value"] + lines[1:], "fraction": ["id,plddt"] + [name + ",0.5" for name in names]}.get(how, lines)
if how != "nothing":
    open(out, "w").write("\\n".join(lines) + "\\n")
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    path = tmp_path_factory.mktemp("fold") / "a program.py"
    path.write_text(PROGRAM)
    return lambda how: f"'{sys.executable}' '{path}' {{fasta}} {{csv}} {how}"


def test_folding_by_a_command(command):
    np.testing.assert_array_equal(protein.fold(command("well"), SEQUENCES), [58, 53, np.nan, 98])
    assert np.isnan(protein.fold(command("dies"), ["", ""])).all()  # nothing to fold
    context = Context(tokenizer=RESIDUES, held_out=rows(["MKVL"]), fold=command("well"))
    plddt = protein.evaluate(rows(SEQUENCES), np.full(4, 64), context)["plddt"]
    assert (plddt.value, plddt.denominator_B.sum()) == (pytest.approx((58 + 53 + 98) / 3), 3)


@pytest.mark.parametrize(
    "how, says",
    [
        ("short", "left s3 out, of 3 sequences"),
        ("nan", "line 4 of the folding command's CSV gives s3 a pLDDT of nan; it must be 0 to 100"),
        ("text", "gives s3 a pLDDT of good"),
        ("high", "gives s3 a pLDDT of 101"),
        ("twice", "line 5 of the folding command's CSV has s3 again"),
        ("stranger", "tells of x, which it was not given"),
        ("columns", "line 2 of the folding command's CSV has no id and plddt"),
        ("fraction", "gives pLDDT up to 0.500; multiply by 100"),
        ("dies", "ended with 1: out of memory"),
        ("nothing", "wrote no CSV that can be read"),
    ],
)
def test_what_a_folding_command_gets_wrong(how, says, command):
    with pytest.raises(UserError, match=says):
        protein.fold(command(how), SEQUENCES)


def test_a_folding_command_that_is_none():
    with pytest.raises(UserError, match=r"cannot run the folding command nowhere/fold: No such file"):
        protein.fold("nowhere/fold {fasta} {csv}", SEQUENCES)
    with pytest.raises(UserError, match=r"lacks {fasta} or {csv}"):
        protein.fold("fold {fasta}", SEQUENCES)


TINY = """
import sys, torch
from transformers import EsmConfig, EsmForProteinFolding
from transformers.models.esm.configuration_esm import EsmFoldConfig
trunk = dict(num_blocks=1, sequence_state_dim=32, pairwise_state_dim=16, sequence_head_width=8, pairwise_head_width=8, position_bins=8,
             chunk_size=64, structure_module=dict(sequence_dim=32, pairwise_dim=16, ipa_dim=4, resnet_dim=8, num_heads_ipa=2,
             num_qk_points=2, num_v_points=2, num_blocks=1, num_transition_layers=1, num_resnet_blocks=1, num_angles=7))
fold = dict(trunk=trunk, fp16_esm=False, lddt_head_hid_dim=8)
torch.manual_seed(0)
config = EsmConfig(vocab_size=33, mask_token_id=32, pad_token_id=1, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                   intermediate_size=24, position_embedding_type="rotary", is_folding_model=True, esmfold_config=fold)
EsmForProteinFolding(config).save_pretrained(sys.argv[1])
"""


@pytest.mark.slow
def test_the_program_that_folds(tmp_path):
    """external/esmfold.py with a tiny random model, in another environment: see tests/models/make_golden.py."""
    python = os.environ.get("TRANSFORMERS_PYTHON")
    if not python:
        pytest.skip("set TRANSFORMERS_PYTHON to a python that has torch and transformers (tests/models/make_golden.py)")
    subprocess.run([python, "-c", TINY, tmp_path / "model"], check=True, capture_output=True)
    found = protein.fold(f"{python} {REPO}/external/esmfold.py --fasta={{fasta}} --csv={{csv}} --model={tmp_path}/model --cpu", SEQUENCES)
    assert np.isnan(found).tolist() == [False, False, True, False]
    assert (found[[0, 1, 3]] > 1).all()
