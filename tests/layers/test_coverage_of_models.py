"""A sample of `python -m tests.coverage_of_models`: a few types of each kind, and that the comparison can fail."""

from __future__ import annotations

import pytest

from tests.coverage_of_models import compare
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
