"""Collectives have no derivatives: they refuse a tensor with a tangent, a batch of vmap or a gradient."""

from __future__ import annotations

from iris.errors import ArgumentError
import pytest
import torch
from torch.autograd import forward_ad

from tests.harness import UNDER_TORCHRUN, WORLDS, both, run_ranks

pytestmark = [*both, pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])]


def collectives_body(ctx) -> tuple[list[str], list[str]]:
    w, ccl, peer = ctx.num_ranks, ctx.ccl, ctx.cur_rank ^ 1
    part, whole = ctx.ones(w, 2 * w), ctx.ones(w * w, 2 * w)
    ccl.init_p2p(64, torch.float32)
    calls = {
        "all_reduce": lambda t: ccl.all_reduce(torch.empty_like(part), t),
        "all_gather": lambda t: ccl.all_gather(torch.empty_like(whole), t),
        "all_to_all": lambda t: ccl.all_to_all(torch.empty_like(part), t),
        "reduce_scatter": lambda t: ccl.reduce_scatter(torch.empty_like(t)[:1], t),
        "all_reduce_norm": lambda t: ccl.all_reduce_norm(
            torch.empty_like(part), torch.ones_like(part), t, torch.ones_like(part[0])
        ),
        "broadcast": ccl.broadcast,
        "reduce": lambda t: ccl.reduce(torch.empty_like(part), t),
        "gather": lambda t: ccl.gather(torch.empty_like(whole), t),
        "scatter": lambda t: ccl.scatter(t, whole),
    }
    copies = {"put": lambda t: ctx.put(t, ctx.cur_rank, whole[: len(part)]), "ctx.broadcast": ctx.broadcast}
    if w == 2:
        calls["sendrecv"] = lambda t: ccl.sendrecv(t, torch.empty_like(part), peer, peer)
    accepted, messages = [], []

    def expect_refusal(name: str, call) -> None:
        try:
            call()
        except ArgumentError as error:
            messages.append(str(error))
        else:
            accepted.append(name)

    for name, call in (calls | copies).items():
        with torch.no_grad():
            call(part)
            call(part)  # from the second call on by the shortcut, which must not take the tensors below
            with forward_ad.dual_level():
                expect_refusal(f"{name}, dual", lambda call=call: call(forward_ad.make_dual(part, part)))
            batch = part.expand(2, *part.shape)
            expect_refusal(
                f"{name}, vmap", lambda call=call, batch=batch: torch.func.vmap(lambda t: _nothing(call(t)))(batch)
            )
        if name in copies:
            continue  # which autograd does not see
        tracked = part.detach().requires_grad_()
        expect_refusal(f"{name}, grad", lambda call=call, tracked=tracked: call(tracked))
    return accepted, messages


def _nothing(_: object) -> torch.Tensor:
    return torch.zeros(1)


def test_collectives_refuse_tensors_that_are_differentiated(world_size: int) -> None:
    for accepted, messages in run_ranks(world_size, collectives_body):
        assert not accepted
        assert all(any(word in each for word in ("requires grad", "tangent", "vmap")) for each in messages), messages
