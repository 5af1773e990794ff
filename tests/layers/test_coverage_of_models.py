"""A sample of `python -m tests.coverage_of_models`: a few types of each kind, and that the comparison can fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.coverage_of_models import compare, table, tiny
from tests.harness import UNDER_TORCHRUN, run_ranks

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own")
QUICK = ["gpt2", "deepseek_v2"]  # linears of another class, a mixture's shared experts: what no small Llama has
REST = ["bert", "gemma2", "llama4_text", "gpt_oss", "jamba", "lfm2", "longcat_flash", "bloom"]
SAMPLE = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)]


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_sample_of_types_gives_the_unsplit_answers(model_type: str) -> None:
    single, double, _ = compare.reference(model_type)
    for world_size in (2, 3):
        outcomes = run_ranks(world_size, compare.split_body, model_type, timeout=400)
        assert not outcomes[0].refusal, outcomes[0].refusal
        assert not compare.judge(single, double, outcomes), f"{world_size} ranks"
        assert min(each.share for each in outcomes) > 0.6


def test_a_wrong_answer_is_seen() -> None:
    random = torch.Generator().manual_seed(1)
    right = compare.Answer(torch.randn(2, 5, 9, generator=random), [[1, 2]])
    near = compare.Answer(right.logits + 1e-7, [[1, 2]])
    outcome = compare.Outcome(right, 1.0)
    assert not compare.judge(near, right, [outcome, outcome])
    off = replace(outcome, answer=compare.Answer(right.logits + 0.01, [[1, 2]]))
    assert "off by 1.0e-02" in compare.judge(near, right, [outcome, off])
    other = replace(outcome, answer=compare.Answer(right.logits, [[1, 3]]))
    assert "goes on with [[1, 3]]" in compare.judge(near, right, [outcome, other])
    apart = replace(outcome, answer=compare.Answer(right.logits * (1 + 1e-6), [[1, 2]]))
    assert "differ from rank 0's" in compare.judge(near, right, [outcome, apart])
    failed = replace(outcome, answer=None, failure="ValueError: no")
    assert compare.judge(near, right, [failed]) == "rank 0's call fails: ValueError: no"


def test_the_page_tells_all_outcomes_and_of_two_runs_the_worse() -> None:
    split = {"outcome": "split", "share": 0.97, "message": ""}
    refused = {"outcome": "refused", "share": 0.0, "message": "StyleError: a | b"}
    wrong = {"outcome": "wrong", "share": 0.0, "message": "off"}
    both = table.merged(
        {"gpt2": split, "llama": split, "x": refused}, {"gpt2": {**split, "share": 0.9}, "llama": wrong}
    )
    page = table.render(both, [2, 3])
    assert "| gpt2 | 90 % | built in |" in page and "| x | StyleError: a \\| b |" in page and "| llama | off |" in page
    assert "| | 1 | 1 | 0 | 1 |" in page


def test_rows_of_the_page_are_exchanged_for_types_that_stay_split() -> None:
    rows = {name: {"outcome": "split", "share": 0.5, "message": ""} for name in ("gpt2", "mamba2")}
    page = table.render(rows, [2, 3])
    other = {"outcome": "split", "share": 0.75, "message": "why", "engine": "yes"}
    lines = table.updated(page, {"mamba2": other}).splitlines()
    assert [line for line in lines if line not in page.splitlines()] == ["| mamba2 | 75 % | built in | yes |  | why |"]
    for results in ({"mamba2": {**other, "outcome": "refused"}}, {"bloom": other}):
        with pytest.raises(ValueError, match="make all of it"):
            table.updated(page, results)


def test_tiny_models_are_the_same_wherever_they_are_built() -> None:
    one, other = (tiny.build("mixtral").state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert len(tiny.types()) > 100
