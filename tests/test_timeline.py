"""Timelines: times inside each other are counted once, pictures show what was recorded, a run leaves all its files."""

import gzip
import json
from pathlib import Path
import sys
from xml.etree import ElementTree

from iris import tracing
from iris_ops import FusedConfig
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks are run from the checkout, they are not installed

from benchmarks import timeline  # noqa: E402
from benchmarks.plots import timeline_plots  # noqa: E402
from tests.processes import run_benchmark  # noqa: E402

NAMES = {6: "wait", 7: "product", 8: "push", 9: "sum"}


def recorded(*rows):
    """(multiprocessor, program, event, begin, end, target, bytes) as events in order of time."""
    events = np.zeros(len(rows), dtype=tracing.EVENT)
    fields = ("multiprocessor", "program", "event", "begin", "end", "target_rank", "bytes")
    for event, row in zip(events, rows, strict=True):
        for field, value in zip(fields, row, strict=True):
            event[field] = value
    return events


EVENTS = recorded(
    (3, 0, 7, 1000, 1400, 1, 0),
    (5, 1, 7, 1000, 1200, 1, 0),
    (5, 1, 9, 1200, 1900, 0, 0),  # a sum with two waits inside
    (5, 1, 6, 1250, 1450, 0, 0),
    (3, 0, 8, 1400, 1500, -1, 4096),
    (5, 1, 6, 1500, 1600, 0, 0),
    (3, 0, 7, 1500, 2000, 1, 0),
)


def test_what_is_inside_a_span_is_counted_once():
    assert timeline.own_time(EVENTS).tolist() == [400, 200, 400, 200, 100, 100, 500]
    found = timeline.shares(EVENTS, NAMES)  # of 1000 ns on two multiprocessors
    assert found == pytest.approx({"product": 0.55, "sum": 0.2, "wait": 0.15, "push": 0.05, "nothing recorded": 0.05})


def test_the_picture_shows_ranks_shares_and_the_link(tmp_path):
    ranks = [EVENTS, EVENTS.copy()]
    row = {"op": "rs", "M": 32, "N": 48, "K": 64, "plain_us": 1.5, "traced_us": 1.75, "span_us": 1.0}
    row |= {"names": NAMES, "shares": [timeline.shares(events, NAMES) for events in ranks]}
    report = {"world": 2, "gpu": "GPU", "dtype": "bfloat16", "date": "2026-01-01", "versions": {"torch": "2"}}
    files = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for file in files:
        timeline_plots.draw(report, row, ranks, file)
    assert files[0].read_bytes() == files[1].read_bytes()
    shown = "".join(ElementTree.parse(files[0]).getroot().itertext())
    for text in (
        "rank 0",
        "rank 1",
        "product 55%",
        "push 5%",
        "matmul_reduce_scatter",
        "32, 48, 64",
        "1.75 µs",
        "GB/s",
    ):
        assert text in shown, text


def test_end_to_end_on_two_cpu_ranks(tmp_path):
    run_benchmark("timeline", 2, "--op", "rs,ga", "--rows", "32,32,32", "--out", str(tmp_path))
    assert {file.name for file in tmp_path.iterdir()} == {"timeline_cpu_x2.json", "timeline_cpu_x2.trace.json.gz"}
    rows = json.loads((tmp_path / "timeline_cpu_x2.json").read_text())["rows"]
    trace = json.loads(gzip.decompress((tmp_path / "timeline_cpu_x2.trace.json.gz").read_bytes()))
    titles = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    expected = [f"{op} 32, 32, 32: rank {rank}" for op in ("rs", "ga") for rank in (0, 1)]
    assert [title.rpartition(":")[0] for title in titles] == expected
    for number, row in enumerate(rows):
        assert row["dropped"] == 0 and row["events"] > 4 and row["plain_us"] > 0 < row["traced_us"]
        kinds = {name: int(kind) for kind, name in row["names"].items()}
        ranks = timeline_plots.events_in(trace, number, 2, kinds)
        assert sum(map(len, ranks)) == row["events"]
        span = max(events["end"].max() for events in ranks) - min(events["begin"].min() for events in ranks)
        assert span / 1e3 == pytest.approx(row["span_us"], rel=0.01)
        for found in row["shares"]:
            assert sum(found.values()) == pytest.approx(1, abs=0.01) and found["product"] > 0 < found["push"]
    pictures = timeline_plots.draw_all(tmp_path / "timeline_cpu_x2.json", tmp_path)
    assert [picture.name for picture in pictures] == [f"timeline_{op}_32x32x32_cpu_x2.svg" for op in ("rs", "ga")]
    assert "rank 1" in pictures[0].read_text()


@pytest.mark.parametrize(
    "algorithm, warp_specialised, recorded",
    [("overlapped", False, True), ("one_shot", False, True), ("copy_gather", True, True),
     ("copy_gather", False, False), ("sequential", False, False)],
)  # fmt: skip
def test_rows_of_a_product_apart_are_left_out(algorithm: str, warp_specialised: bool, recorded: bool) -> None:
    assert timeline.is_recorded(FusedConfig(algorithm=algorithm, warp_specialised=warp_specialised)) == recorded
