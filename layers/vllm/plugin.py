"""The entry point `vllm.general_plugins`: vLLM calls `register` in every process before it builds a model.

`register` puts classes in place of vLLM's `RowParallelLinear` and `FusedMoE`, by vLLM's public hook for out-of-tree
layers. They compute what vLLM's do. Their constructors run in the worker, where the configuration is known and not yet
copied for the compiler, so that is where the plug-in installs its compiler pass. On a warm start vLLM loads its
compiled graphs and never runs the pass; the constructor still makes the context and writes the log line.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import fx

    from .install import Installed
    from .prepare import Preparation

_PASS = "post_grad_custom_post_pass"


def register() -> None:
    """Register the layers, unless IRIS_TP_VLLM is 0. May be called several times in a process."""
    if os.environ.get("IRIS_TP_VLLM", "1") == "0":
        return
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.linear import RowParallelLinear

    from .experts import mixture_class

    for base, replaced in ((RowParallelLinear, _served_layer), (mixture_class(), _served_mixture)):
        if base is not None and base.__name__ not in op_registry_oot:
            base.register_oot(replaced(base))


def _served_layer(base: type) -> type:
    class IrisRowParallelLinear(base):  # type: ignore[misc, valid-type]
        """vLLM's row-parallel layer; the first one in a process installs the compiler pass."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            installed, preparation = _of_process.get()
            if preparation is None or not self.reduce_results or self.tp_size == 1:
                return
            if self.bias is not None and not self.skip_bias_add:
                installed.products = False
            weight = getattr(self, "weight", None)
            if weight is None or weight.ndim != 2 or weight.dtype.itemsize != 2:
                return
            preparation.add(weight.data)

    return IrisRowParallelLinear


def _served_mixture(base: type) -> type:
    class IrisFusedMoE(base):  # type: ignore[misc, valid-type]
        """vLLM's mixture of experts."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            installed, preparation = _of_process.get()
            if preparation is None:
                return
            from . import experts

            if experts.refusal(self) is None and preparation.add_experts(self.w13_weight, self.w2_weight, self.top_k):
                installed.experts = True

    return IrisFusedMoE


class _OfProcess:
    """The result of `install`, which runs once a process."""

    def __init__(self) -> None:
        self._result: tuple[Installed, Preparation | None] | None = None

    def get(self) -> tuple[Installed, Preparation | None]:
        if self._result is None:
            from . import install

            self._result = installed, preparation = install.install()
            if preparation is not None:
                _add_pass(installed)
        return self._result


_of_process = _OfProcess()


def _add_pass(installed: Installed) -> None:
    from vllm.config import get_current_vllm_config

    compilation = get_current_vllm_config().compilation_config
    settings = compilation.inductor_compile_config
    settings[_PASS] = _pass_class(compilation.static_forward_context)(installed, settings.get(_PASS))


def _pass_class(layers: dict[str, Any]) -> type:
    from vllm.compilation.passes.inductor_pass import InductorPass, get_pass_context
    from vllm.logger import init_logger

    from . import experts, ops, rewrite

    logger = init_logger("vllm.iris_tp")

    class IrisPass(InductorPass):
        """Rewrite the graphs of compile ranges up to `most_rows`. `before`: the user's own pass, which runs first."""

        def __init__(self, installed: Installed, before: InductorPass | None) -> None:
            self.installed, self.before = installed, before

        def uuid(self) -> str:
            """Return the key of Inductor's cache: the sources, the settings and the pass before."""
            sources = InductorPass.hash_source(*map(_source, (rewrite, ops, experts)))
            before = self.before.uuid() if self.before is not None else ""
            return json.dumps([sources, self.installed.settings(), before], sort_keys=True)

        def is_applicable_for_range(self, compile_range: Any) -> bool:
            return self.before is not None or compile_range.end <= self.installed.most_rows

        def __call__(self, graph: fx.Graph) -> None:
            if self.before is not None:
                self.before(graph)
            rows, installed = get_pass_context().compile_range, self.installed
            if rows.end > installed.most_rows:
                return
            few_rows = rows.end <= installed.few_rows
            served = installed.experts and experts.all_served(layers.values())
            inserted = rewrite.rewrite(graph, installed.group, few_rows, installed.products, served)
            logger.debug("iris-tp: %s in rows %s", dict(inserted), rows)

    return IrisPass


def _source(module: Any) -> str:
    import inspect

    return inspect.getsource(module)
