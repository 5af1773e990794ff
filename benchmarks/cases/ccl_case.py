"""One row of `benchmarks.ccl` on one rank: its inputs, the expected result of every rank, and its contenders."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
import functools
import math

from iris_tp.bench.team import Team
import torch
import torch.distributed as dist

COPIES = 2  # of the inputs, so that a stale result is seen

Call = Callable[[int], torch.Tensor]


@dataclass(eq=False)
class Case:
    """One row on one rank: inputs, and what every rank must get."""

    op: str
    nbytes: int
    team: Team
    dtype: torch.dtype
    inputs: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        w = self.team.world
        n = -(-self.nbytes // (self.dtype.itemsize * w * w)) * w * w
        self.shape, self.out_shape = {
            "all_reduce": ((n,), (n,)),
            "all_gather": ((n // w,), (n,)),
            "reduce_scatter": ((w, n // w), (1, n // w)),
            "all_to_all": ((1, n), (1, n)),
        }[self.op]
        generator = torch.Generator(self.team.device).manual_seed(self.nbytes % 65521 * 64 + self.team.rank)
        draw = functools.partial(torch.randn, generator=generator, device=self.team.device, dtype=self.dtype)
        self.inputs = [draw(self.shape) for _ in range(COPIES)]

    @property
    def bus_bytes(self) -> float:
        w = self.team.world
        return self.nbytes * (w - 1) / w * (2 if self.op == "all_reduce" else 1)

    def empty(self) -> torch.Tensor:
        return torch.empty(self.out_shape, dtype=self.dtype, device=self.team.device)

    @functools.cache  # noqa: B019  a case is short-lived
    def expected(self, copy: int) -> torch.Tensor:
        """Compute the result by torch.distributed; sums in float32."""
        reduces = self.op in ("all_reduce", "reduce_scatter")
        given = self.inputs[copy].float() if reduces else self.inputs[copy]
        out = torch.empty(self.out_shape, dtype=given.dtype, device=given.device)
        if self.op == "all_reduce":
            out.copy_(given)
            dist.all_reduce(out)
        elif self.op == "all_gather":
            dist.all_gather_into_tensor(out, given)
        elif self.op == "reduce_scatter":
            dist.reduce_scatter_tensor(out, given)
        else:
            parts = list(out.view(self.team.world, -1).unbind())
            sent = list(given.reshape(self.team.world, -1).unbind())
            if self.team.cuda:
                dist.all_to_all(parts, sent)
            else:  # gloo has none
                everything = [torch.empty_like(given) for _ in range(self.team.world)]
                dist.all_gather(everything, given)
                mine = torch.cat(everything).view(self.team.world, self.team.world, -1)[:, self.team.rank]
                out.view(self.team.world, -1).copy_(mine)
        return out

    def error(self, out: torch.Tensor, copy: int) -> float:
        """Return the error, 1 being the limit: for sums, of rounding at every one of them; for copies, bits."""
        expected = self.expected(copy)
        if self.op in ("all_gather", "all_to_all"):
            return 0.0 if torch.equal(out.view_as(expected), expected) else math.inf
        difference = (out.view_as(expected).float() - expected).abs()
        scale = expected.square().mean().sqrt()
        eps = torch.finfo(self.dtype).eps
        in_norm = difference.square().mean().sqrt() / scale / eps
        worst = torch.maximum(in_norm, difference.max() / scale / (8 * eps)).item()
        return worst if math.isfinite(worst) else math.inf

    def poison(self, out: torch.Tensor) -> None:
        """Fill with NaN; no rank goes on before all have done so."""
        out.fill_(float("nan"))
        self.team.synchronize()
        self.team.barrier()
        self.team.synchronize()

    def check(self, contender: "Contender", call: Call) -> float:
        worst = 0.0
        for copy in (0, COPIES - 1):
            if not contender.in_place:
                self.poison(call(copy))  # the first call also compiles and allocates
            worst = max(worst, self.error(call(copy), copy))
        return worst


@dataclass(frozen=True)
class Contender:
    name: str
    kind: str  # "ours" or "rival"
    prepare: Callable[[Case], tuple[Call, Call]]  # the call that is checked, and the one that is timed
    supports: Callable[[Case], bool]
    in_place: bool = False  # what it returns was its input: poison would be summed
    plan: Callable[[Case], dict] | None = None
    capture: Callable[[], AbstractContextManager] = nullcontext  # in which a graph is made


class Ours:
    """A context, and one output on its heap that all rows share."""

    def __init__(self, team: Team, nbytes: int, heap_gib: float, dtype: torch.dtype) -> None:
        import iris

        self.ctx = iris.iris(int(heap_gib * 2**30))
        self.buffer = self.ctx.empty(nbytes // dtype.itemsize + team.world**2, dtype=dtype)

    def out(self, case: Case) -> torch.Tensor:
        return self.buffer[: math.prod(case.out_shape)].view(case.out_shape)

    def call(self, case: Case, config=None) -> Call:
        out, op = self.out(case), getattr(self.ctx.ccl, case.op)

        def call(i: int) -> torch.Tensor:
            op(out, case.inputs[i], config=config)
            return out

        return call

    def contender(self) -> Contender:
        def prepare(case: Case) -> tuple[Call, Call]:
            call = self.call(case)
            return call, call

        return Contender("ours", "ours", prepare, lambda case: True, plan=self.plan)

    def plan(self, case: Case, config=None) -> dict:
        return asdict(self.ctx.ccl.plan(case.op, self.out(case), case.inputs[0], config, explained=False))
