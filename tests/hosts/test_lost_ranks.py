"""A rank of a model on several hosts that ends, stops or fails at any moment: every other rank names its host in time.

By "pp" the model's layers are divided between hosts; by "hosts" each layer is split over the ranks of all of them.
"""

from __future__ import annotations

from collections.abc import Callable
import os
import signal
import time
from typing import Any

from iris.errors import IrisError
import layers
from layers.pipeline import stage as stages
import pytest
import torch
import torch.distributed as dist

from tests.hosts.meshes import on_mesh
from tests.hosts.namespaces import needs_namespaces, run_hosts
from tests.layers import models
from tests.processes import patient

pytestmark = needs_namespaces()

_LIMIT_S = 8.0
_ENV = {"IRIS_TIMEOUT": str(_LIMIT_S)}


class Own(Exception):
    """What a user's code raises."""


def _end(how: str) -> None:
    if how == "raises":
        raise Own("out of luck")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    stopped = os.getpid()
    if os.fork() == 0:  # ends it when the others have given up, so that the test ends, too
        time.sleep(_LIMIT_S + 6)
        os.kill(stopped, signal.SIGKILL)
        os._exit(0)
    os.kill(stopped, signal.SIGSTOP)


def _at(moment: str, model: Any, end: Callable[[], None]) -> None:
    """Let `end` run at this `moment` of the next call."""
    if moment == "loading":
        from layers.hf import parallelize

        parallelize._finish = lambda *_: end()
        return
    if moment == "prefill":
        model.model.layers[-1].register_forward_pre_hook(lambda *_: end())
    elif moment == "decode":
        calls: list[int] = []
        model.model.layers[-1].register_forward_pre_hook(
            lambda *_: end() if calls.append(0) or len(calls) == 3 else None
        )
    elif moment == "send":  # the next stage, or another one for the logits, waits for this rank's data by then
        stages.between_graphs = lambda action: (time.sleep(1), end())
    else:  # "logits"
        model.get_output_embeddings().register_forward_pre_hook(lambda *_: end())


def _model(stages: int) -> Any:
    import transformers

    torch.manual_seed(5)
    config = transformers.LlamaConfig(**models.PLAIN | {"num_hidden_layers": stages, "num_attention_heads": 4})
    return transformers.LlamaForCausalLM._from_config(config, dtype=torch.float32).eval()


def _generating(
    rank: int, world_size: int, first: str, inside: int, lost: tuple[int, ...], moment: str, how: str, engine: bool
) -> tuple[float, str]:
    begin = 0.0
    try:
        with on_mesh(first, world_size, inside) as (mesh, ctx):
            model = _model(world_size // inside)
            if moment == "loading":
                dist.barrier()
                if rank in lost:
                    _at(moment, model, lambda: _end(how))
                begin = time.monotonic()
            layers.parallelize(model, ctx, mesh=mesh if first == "pp" else None)
            generate = models.generate
            if engine:
                engines = layers.Engine(model, ctx, batch_size=2, max_length=32)
                generate = lambda _: engines.generate(models.prompt(), models.NEW)  # noqa: E731
            generate(model)
            if rank in lost:
                _at(moment, model, lambda: _end(how))
            dist.barrier()
            begin = time.monotonic()
            generate(model)
    except (IrisError, Own) as error:
        return time.monotonic() - begin, f"{type(error).__name__}: {error}"
    return 0.0, "nothing was raised"


_slow = pytest.mark.slow


@pytest.mark.parametrize(
    "first, ranks, lost, moment, how, engine",
    [
        ("pp", (2, 2), (1,), "prefill", "killed", False),
        ("pp", (2, 2), (1,), "send", "killed", True),
        ("pp", (2, 2), (2,), "decode", "raises", False),
        ("pp", (1, 1, 1), (1,), "loading", "killed", True),
        ("pp", (1, 1, 1), (0,), "prefill", "raises", True),
        pytest.param("pp", (2, 2), (3,), "loading", "killed", False, marks=_slow),
        pytest.param("pp", (2, 2), (0, 3), "decode", "killed", True, marks=_slow),
        pytest.param("pp", (2, 2), (0, 1), "send", "killed", False, marks=_slow),
        pytest.param("pp", (2, 2), (1,), "decode", "stopped", True, marks=_slow),
        pytest.param("pp", (2, 2), (3,), "send", "stopped", False, marks=_slow),
        pytest.param("pp", (2, 2), (0,), "loading", "stopped", True, marks=_slow),
        pytest.param("pp", (2, 2), (0,), "send", "raises", False, marks=_slow),
        pytest.param("pp", (2, 2), (3,), "loading", "raises", True, marks=_slow),
        pytest.param("pp", (1, 1, 1), (0,), "decode", "killed", False, marks=_slow),
        pytest.param("pp", (1, 1, 1), (2,), "logits", "killed", True, marks=_slow),
        pytest.param("pp", (1, 1, 1), (0, 1), "decode", "killed", False, marks=_slow),
        pytest.param("pp", (1, 1, 1), (1,), "decode", "stopped", True, marks=_slow),
        pytest.param("pp", (1, 1, 1), (2,), "loading", "stopped", False, marks=_slow),
        pytest.param("pp", (1, 1, 1), (1,), "prefill", "raises", True, marks=_slow),
        pytest.param("pp", (1, 1, 1), (2,), "logits", "raises", False, marks=_slow),
        ("hosts", (2, 2), (1,), "decode", "killed", False),
        pytest.param("hosts", (2, 2), (2,), "decode", "stopped", True, marks=_slow),
        pytest.param("hosts", (2, 2), (3,), "prefill", "raises", False, marks=_slow),
        pytest.param("hosts", (2, 2), (3,), "loading", "killed", False, marks=_slow),
        pytest.param("hosts", (2, 2), (1, 2), "logits", "killed", True, marks=_slow),
        pytest.param("hosts", (1, 1, 1), (0,), "logits", "killed", False, marks=_slow),
        pytest.param("hosts", (1, 1, 1), (0,), "decode", "raises", True, marks=_slow),
        pytest.param("hosts", (1, 1, 1), (1,), "decode", "killed", True, marks=_slow),
        pytest.param("hosts", (1, 1, 1), (1,), "prefill", "killed", True, marks=_slow),
        pytest.param("hosts", (1, 1, 1), (0,), "decode", "stopped", False, marks=_slow),
        pytest.param("hosts", (1, 1, 1), (2,), "decode", "raises", True, marks=_slow),
    ],
)
def test_every_rank_names_what_was_lost(
    first: str, ranks: tuple[int, ...], lost: tuple[int, ...], moment: str, how: str, engine: bool
) -> None:
    inside = ranks[0]
    ends = run_hosts(ranks, _generating, first, inside, lost, moment, how, engine, env=_ENV, timeout=60)
    for rank, end in enumerate(ends):
        if rank in lost:
            assert how != "raises" or end.result[1] == "Own: out of luck", end.traceback
            continue
        assert end.exitcode == 0, end.traceback
        seconds, message = end.result
        assert seconds < patient(_LIMIT_S + 3), message
        hosts = {f"host{'abc'[each // inside]}" for each in lost if each // inside != rank // inside}
        own = {f"rank {each % inside}" for each in lost if each // inside == rank // inside}
        named = {f"lost host {each} " for each in hosts} | {f"host {each}: " for each in hosts} | own
        assert any(each in message for each in named), message
        if how == "raises":
            assert "out of luck" in message, message
