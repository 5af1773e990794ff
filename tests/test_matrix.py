"""docs/start/versions.md shows the recorded results, and the pairs are those that torch requires."""

import json
import re

from iris_tp.doctor import TRITON_OF_TORCH, _dotted, _release
import pytest

from tests import matrix


def test_the_page_shows_the_results() -> None:
    assert matrix.rendered(json.loads(matrix.RESULTS.read_text())) in matrix.PAGE.read_text()


@pytest.mark.parametrize("pair", matrix.PAIRS, ids=lambda pair: pair.name)
def test_pairs_are_those_that_torch_requires(pair: matrix.Pair) -> None:
    assert TRITON_OF_TORCH[_release(pair.torch)[:2]] == _release(pair.triton)[:2]


def test_newest_and_oldest_are_pairs() -> None:
    """And the page's table of torch and triton begins and ends with them."""
    table = matrix.PAGE.read_text().split("# Tested versions")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d[\d., ]*\d)(?: \(.*?\))? \| (\d[\d.]*) \|$", table, re.MULTILINE)
    assert rows[0][0].split(", ")[0] == matrix.PAIRS[0].torch.rpartition(".")[0]
    assert rows[-1] == tuple(each.rpartition(".")[0] for each in (matrix.PAIRS[-1].torch, matrix.PAIRS[-1].triton))
    in_table = {torch: triton for torches, triton in rows for torch in torches.split(", ")}
    assert in_table == {_dotted(torch): _dotted(triton) for torch, triton in TRITON_OF_TORCH.items()}
    for name, pair in (("newest", matrix.PAIRS[-1]), ("docs", matrix.PAIRS[-1]), ("oldest", matrix.PAIRS[0])):
        expected = (matrix.ROOT / "requirements" / f"{name}.txt").read_text()
        assert f"torch=={pair.torch}" in expected
        assert f"triton=={pair.triton}" in expected or f"triton~={pair.triton}" in expected
