"""The graph rewriting of the vLLM plug-in: each pattern, what must not match, and that results stay what they were.

Graphs are built with operators of vLLM's names. Without vLLM the test registers them, with a sum over ranks that
multiplies by two; each rewritten graph runs with operators that do the same in plain torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
import operator

from layers.vllm import rewrite
import pytest
import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._subclasses import FakeTensorMode

aten = torch.ops.aten
GROUP, EPS, M, K, N, WIDE = "tp:0", 1e-5, 4, 64, 128, 96
_libraries: list[torch.library.Library] = []


def define(space: str, schema: str, kernel: Callable) -> None:
    library = torch.library.Library(space, "FRAGMENT")
    library.define(schema)
    library.impl(schema.split("(")[0], kernel, "CompositeExplicitAutograd")
    _libraries.append(library)


def add_norm(x, residual, weight, eps, variance_size=None):  # noqa: ANN001, ANN201
    h = x.float() + residual.float()
    normed = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype), h.to(x.dtype)


if not hasattr(torch.ops.vllm, "all_reduce"):
    define("vllm", "all_reduce(Tensor tensor, str group_name) -> Tensor", lambda x, name: 2 * x)
if not hasattr(torch.ops.vllm_ir, "fused_add_rms_norm"):
    schema = "(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, int? variance_size=None) -> (Tensor, Tensor)"
    define("vllm_ir", "fused_add_rms_norm" + schema, add_norm)
if not hasattr(torch.ops.vllm, "flashinfer_trtllm_fused_allreduce_norm"):
    schema = (
        "(Tensor(a!) allreduce_in, Tensor(b!) residual, Tensor rms_gamma, float rms_eps, int world_size, "
        "bool launch_with_pdl, bool fp32_acc, int max_token_num, int pattern_code, Tensor(c!)? norm_out=None, "
        "Tensor(d!)? quant_out=None, Tensor(e!)? scale_out=None, Tensor? scale_factor=None, float weight_bias=0.0)"
        " -> ()"
    )
    define("vllm", "flashinfer_trtllm_fused_allreduce_norm" + schema, lambda *_: None)
if not hasattr(torch.ops.vllm, "moe_forward"):
    schema = (
        "(Tensor(a!) hidden_states, Tensor router_logits, Tensor? shared_experts_input, Tensor? input_ids, "
        "str layer_name, int hidden_dim_unpadded) -> Tensor"
    )
    define("vllm", "moe_forward" + schema, lambda x, *_: x.relu() - x / 4)
if not hasattr(torch.ops.iris_vllm, "experts_all_reduce"):
    schema = "(Tensor x, Tensor logits, str layer_name, str group) -> Tensor"
    define("iris_vllm", "experts_all_reduce" + schema, lambda x, *_: 2 * (x.relu() - x / 4))
    schema = (
        "(Tensor x, Tensor logits, str layer_name, Tensor residual, Tensor norm_weight, float eps, str group) "
        "-> (Tensor, Tensor)"
    )
    define(
        "iris_vllm", "experts_all_reduce_rms_norm" + schema,
        lambda x, logits, name, *rest: add_norm(2 * (x.relu() - x / 4), *rest[:-1]),
    )  # fmt: skip


class Graph:
    """A graph that is built node by node, with the fake tensors that Inductor's graphs carry."""

    def __init__(self) -> None:
        self.graph, self.mode, self.inputs = fx.Graph(), FakeTensorMode(), {}

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        self.inputs[name] = torch.randn(shape, generator=torch.Generator().manual_seed(len(self.inputs))).to(dtype)
        return node

    def call(self, target: Callable, *args: object, **kwargs: object) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        given, named = fx.node.map_arg((args, kwargs), lambda each: each.meta["val"])
        with self.mode:
            node.meta["val"] = target(*given, **named)
        return node

    def product(self, x: fx.Node, weight: fx.Node) -> fx.Node:
        return self.call(aten.mm.default, x, self.call(aten.permute.default, weight, [1, 0]))

    def reduced(self, x: fx.Node, group: str = GROUP) -> fx.Node:
        return self.call(torch.ops.vllm.all_reduce.default, x, group)

    def norm(self, x: fx.Node, residual: fx.Node, weight: fx.Node) -> tuple[fx.Node, fx.Node]:
        both = self.call(torch.ops.vllm_ir.fused_add_rms_norm.default, x, residual, weight, EPS)
        return self.call(operator.getitem, both, 0), self.call(operator.getitem, both, 1)

    def gated(self, both: fx.Node, width: int) -> fx.Node:
        """silu(gate) * partner as Inductor has it after its decompositions."""
        gate = self.call(aten.slice.Tensor, both, 1, 0, width)
        partner = self.call(aten.slice.Tensor, both, 1, width, 2**63 - 1)
        wide = self.call(torch.ops.prims.convert_element_type.default, gate, torch.float32)
        down = self.call(aten.add.Tensor, self.call(aten.exp.default, self.call(aten.neg.default, wide)), 1)
        silu = self.call(aten.div.Tensor, wide, down)
        narrow = self.call(torch.ops.prims.convert_element_type.default, silu, torch.bfloat16)
        return self.call(aten.mul.Tensor, narrow, partner)

    def layer(self, flashinfer: bool = False) -> None:
        """The graph between two attentions: output projection, norm, gated MLP, norm, q, k and v."""
        x, o, residual = self.input("x", M, K), self.input("o", N, K), self.input("residual", M, N)
        first, second = self.input("first", N), self.input("second", N)
        up, down, qkv = self.input("up", 2 * WIDE, N), self.input("down", N, WIDE), self.input("qkv", 48, N)
        fuse = self.flashinfer if flashinfer else lambda x, *rest: self.norm(self.reduced(x), *rest)
        normed, h = fuse(self.product(x, o), residual, first)
        normed, h = fuse(self.product(self.gated(self.product(normed, up), WIDE), down), h, second)
        self.graph.output((self.product(normed, qkv), h))

    def flashinfer(self, x: fx.Node, residual: fx.Node, weight: fx.Node) -> tuple[fx.Node, fx.Node]:
        node = self.graph.call_function(
            auto_functionalized,
            (torch.ops.vllm.flashinfer_trtllm_fused_allreduce_norm.default,),
            dict(
                allreduce_in=x, residual=residual, rms_gamma=weight, rms_eps=EPS, world_size=2, launch_with_pdl=True,
                fp32_acc=True, max_token_num=64, pattern_code=1, norm_out=None, quant_out=None, scale_out=None,
            ),
        )  # fmt: skip
        with self.mode:
            node.meta["val"] = (None, *(torch.empty(M, N, dtype=torch.bfloat16) for _ in range(2)))
        return self.call(operator.getitem, node, 1), self.call(operator.getitem, node, 2)

    def mixture(self, x: fx.Node, shared: fx.Node | None = None) -> tuple[fx.Node, fx.Node]:
        """Return the results of vLLM's operator, which may change its input: the mixture, and what `x` is after it."""
        node = self.graph.call_function(
            auto_functionalized,
            (torch.ops.vllm.moe_forward.default,),
            dict(
                hidden_states=x, router_logits=x, shared_experts_input=shared, input_ids=None, layer_name="layers.0",
                hidden_dim_unpadded=0,
            ),
        )  # fmt: skip
        with self.mode:
            node.meta["val"] = tuple(torch.empty_like(x.meta["val"]) for _ in range(2))
        return self.call(operator.getitem, node, 0), self.call(operator.getitem, node, 1)

    def rewritten(self, few_rows: bool = True, products: bool = True, experts: bool = True) -> Counter[str]:
        self.graph.eliminate_dead_code()
        found = rewrite.rewrite(self.graph, GROUP, few_rows, products, experts)
        self.graph.lint()
        return found

    def targets(self) -> list[str]:
        return [str(node.target) for node in self.graph.nodes if node.op == "call_function"]

    def run(self) -> list[torch.Tensor]:
        found = fx.GraphModule(torch.nn.Module(), self.graph)(*self.inputs.values())
        return [t.double() for t in (found if isinstance(found, tuple) else (found,))]


@pytest.fixture(autouse=True)
def plain_torch() -> Iterator[None]:
    """The operators that a rewritten graph has, in plain torch, with the sum over ranks of this test."""
    from iris_ops.kernels.rmsnorm_epilogue import first_half, second_half

    def matmul(A, weight, group):  # noqa: ANN001, ANN202
        return 2 * (A @ weight.t())

    def matmul_norm(A, weight, residual, norm_weight, group):  # noqa: ANN001, ANN202
        h = (2.0 * (A.float() @ weight.t().float()) + residual.float()).to(A.dtype)
        return h, *first_half(h, norm_weight)

    def whole_norm(A, weight, residual, norm_weight, eps, group):  # noqa: ANN001, ANN202
        return add_norm(matmul(A, weight, group), residual, norm_weight, eps)

    def skinny(x, weight, bias, scale, epilogue, squares=None, eps=0.0):  # noqa: ANN001, ANN202
        x = x if squares is None else second_half(x, squares, eps)
        y = x @ weight.t()
        gate, partner = y.chunk(2, -1)
        return torch.nn.functional.silu(gate) * partner if epilogue else y

    scoped = torch.library._scoped_library
    with scoped("iris_vllm", "IMPL") as own, scoped("iris_ops", "IMPL") as ops:
        own.impl("matmul_all_reduce", matmul, "CPU")
        own.impl("matmul_all_reduce_norm", matmul_norm, "CPU")
        own.impl("matmul_all_reduce_rms_norm", whole_norm, "CPU")
        own.impl("all_reduce", lambda x, group: 2 * x, "CPU")
        own.impl("all_reduce_norm", lambda x, r, w, eps, group: add_norm(2 * x, r, w, eps), "CPU")
        ops.impl("skinny_matmul", skinny, "CPU")
        yield


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 0.02 * theirs.norm()


def test_norms_of_few_rows_go_into_their_neighbours() -> None:
    layer = Graph()
    layer.layer()
    expected = layer.run()
    found = layer.rewritten()
    assert found == {"matmul_all_reduce_norm": 2}
    assert layer.targets().count("iris_ops.skinny_matmul.default") == 2
    assert not any("vllm." in target.replace("iris_vllm.", "") or "aten.mm" in target for target in layer.targets())
    gates = [node.args[4] for node in layer.graph.nodes if str(node.target) == "iris_ops.skinny_matmul.default"]
    assert gates == ["gate", ""]
    assert_same(layer.run(), expected)


def test_flashinfers_nodes_are_rewritten_alike() -> None:
    plain, fused = Graph(), Graph()
    plain.layer()
    fused.layer(flashinfer=True)
    expected = plain.run()
    assert fused.rewritten() == plain.rewritten() == {"matmul_all_reduce_norm": 2}
    assert fused.targets() == plain.targets()
    assert_same(fused.run(), expected)


def test_norms_of_more_rows_end_their_all_reduce() -> None:
    for flashinfer in (False, True):
        layer, plain = Graph(), Graph()
        layer.layer(flashinfer)
        plain.layer()
        expected = plain.run()
        assert layer.rewritten(few_rows=False) == {"matmul_all_reduce_rms_norm": 2}
        assert not any("vllm." in target.replace("iris_vllm.", "") or "vllm_ir" in target for target in layer.targets())
        assert_same(layer.run(), expected)


def test_a_norm_that_others_read_is_whole() -> None:
    g = Graph()
    normed, h = g.norm(
        g.reduced(g.product(g.input("x", M, K), g.input("o", N, K))), g.input("residual", M, N), g.input("weight", N)
    )
    g.graph.output((g.product(normed, g.input("up", 48, N)), normed, h))
    expected = g.run()
    assert g.rewritten() == {"matmul_all_reduce_rms_norm": 1}
    assert_same(g.run(), expected)


def test_a_product_without_a_norm() -> None:
    g = Graph()
    g.graph.output((g.call(aten.relu.default, g.reduced(g.product(g.input("x", M, K), g.input("o", N, K)))),))
    expected = g.run()
    assert g.rewritten() == {"matmul_all_reduce": 1}
    assert_same(g.run(), expected)


def test_sums_without_a_product() -> None:
    g = Graph()
    embedded = g.reduced(g.input("x", M, N))
    normed, h = g.norm(g.reduced(g.call(aten.relu.default, embedded)), embedded, g.input("weight", N))
    g.graph.output((normed, h))
    expected = g.run()
    assert g.rewritten() == {"all_reduce": 1, "all_reduce_norm": 1}
    assert_same(g.run(), expected)


@pytest.mark.parametrize("few_rows", [True, False])
@pytest.mark.parametrize("with_norm", [True, False])
def test_mixtures_run_with_their_sums(with_norm: bool, few_rows: bool) -> None:
    g = Graph()
    total = g.reduced(g.mixture(g.input("x", M, N))[0])
    g.graph.output(g.norm(total, g.input("residual", M, N), g.input("weight", N)) if with_norm else total)
    expected = g.run()
    assert g.rewritten(few_rows) == {"experts_all_reduce_rms_norm" if with_norm else "experts_all_reduce": 1}
    assert len(g.targets()) == (3 if with_norm else 1)
    assert_same(g.run(), expected)


@pytest.mark.parametrize("case", ["refused", "shared expert", "input read later", "read twice"])
def test_other_mixtures_are_left(case: str) -> None:
    g = Graph()
    x = g.input("x", M, N)
    mixture, after = g.mixture(x, x if case == "shared expert" else None)
    total = g.reduced(mixture)
    results = {"input read later": (total, after), "read twice": (total, mixture)}
    g.graph.output(results.get(case, total))
    expected = g.run()
    assert g.rewritten(experts=case != "refused") == {"all_reduce": 1}
    assert_same(g.run(), expected)


def test_products_that_differ_by_rank_are_left() -> None:
    g = Graph()
    g.layer()
    expected = g.run()
    assert g.rewritten(products=False) == {"all_reduce_norm": 2}
    assert_same(g.run(), expected)


@pytest.mark.parametrize("case", ["group", "float16", "not transposed", "read twice"])
def test_what_does_not_match_stays(case: str) -> None:
    g = Graph()
    dtype = torch.float16 if case == "float16" else torch.bfloat16
    x = g.input("x", M, K, dtype=dtype)
    if case == "not transposed":
        y = g.call(aten.mm.default, x, g.input("o", K, N, dtype=dtype))
    else:
        y = g.product(x, g.input("o", N, K, dtype=dtype))
    total = g.reduced(y, "dp:0" if case == "group" else GROUP)
    g.graph.output((total, y) if case == "read twice" else total)
    expected, before = g.run(), g.targets()
    found = g.rewritten()
    if case in ("group", "float16"):
        assert not found
        assert g.targets() == before
    else:  # the sum alone is served
        assert found == {"all_reduce": 1}
    assert_same(g.run(), expected)


@pytest.mark.parametrize("change", ["gelu", "halves in turn", "partner read twice"])
def test_only_silu_of_the_first_half_is_a_gate(change: str) -> None:
    g = Graph()
    normed, h = g.norm(
        g.reduced(g.product(g.input("x", M, K), g.input("o", N, K))), g.input("residual", M, N), g.input("weight", N)
    )
    both = g.product(normed, g.input("up", 2 * WIDE, N))
    first, second = g.call(aten.slice.Tensor, both, 1, 0, WIDE), g.call(aten.slice.Tensor, both, 1, WIDE, 2 * WIDE)
    if change == "halves in turn":
        first, second = second, first
    act = g.call(aten.gelu.default if change == "gelu" else aten.silu.default, first)
    result = g.call(aten.mul.Tensor, act, second)
    g.graph.output((result, h, second) if change == "partner read twice" else (result, h))
    expected = g.run()
    assert g.rewritten() == {"matmul_all_reduce_norm": 1}
    (skinny,) = [node for node in g.graph.nodes if str(node.target) == "iris_ops.skinny_matmul.default"]
    assert skinny.args[4] == ""
    assert_same(g.run(), expected)
