"""`generate()` on split models: every rank must draw the same token, or the ranks' caches diverge.

Greedy search needs nothing: logits are gathered, so every rank has the same bits. Sampling draws from each process's
own random generators. So the model instance's `generate` first takes over rank 0's generator states; after that the
ranks run the same operations on the same bits, and agree to the end of the call: beams, assistants and prompt
lookup too. One broadcast a call, none a token. For users: rank 0's seed is used. The class stays unchanged; only
the instance's methods are wrapped.

Options that would separate the ranks are refused at entry. `max_time` stops each rank by its own clock, and one that
stops alone leaves the others waiting. Continuous batching schedules requests in a thread of each process, as they
arrive there. Compilation, which Hugging Face enables for static caches on GPUs, is disabled in the instance's
generation config: users call torch.compile for it.

Tokens outside the vocabulary, and lengths beyond a table of positions or a static cache, are refused, too: on a GPU
they would end the process. The ranks compare their arguments (`digests`), because other tokens of the same length would
give a mix of both answers. Functions, such as stopping criteria, cannot be compared, so the ranks also compare the
tokens that they return.

A worker thread may call `generate` while the main thread reads its streamer. The context belongs to the worker for the
call, and the streamer ends after that, however the call ends: so a reader never waits in vain, and finds the context
its own again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from inspect import signature
from types import MethodType
from typing import TYPE_CHECKING, Any

from iris.errors import ArgumentError
import torch
from torch import nn

from ..digests import compare, facts
from ..pipeline.stage import run_on_stages, settle, share_generators
from ..serving.arguments import check_memory, check_tokens, words_of
from ..serving.cache import room_of
from ..sharded import ShardedLinear, ranks_of
from ..together import checked
from .caches import check_caches
from .guards import BATCHING, check_plain
from .positions import positions_known

if TYPE_CHECKING:
    from iris.context import Iris

# Caches whose full length is allocated.
_STATIC = "static", "sliding_window", "hybrid", "hybrid_chunked"


def share_rng(ctx: Iris) -> None:
    """Copy rank 0's random generator states to every rank: those of `ctx.device` and of the CPU. Collective.

    `generate` of a split model does this by itself; call it for transformers' own tensor parallelism.

    Args:
        ctx: the context.
    """
    ctx = ranks_of(ctx)
    device = torch.device(ctx.device)
    on_gpu = device.type == "cuda"
    own = torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_gpu else None
    cpu, gpu = ctx.broadcast(own)
    torch.set_rng_state(cpu.cpu())
    if on_gpu:
        torch.cuda.set_rng_state(gpu.cpu(), device)


def agree_on_samples(model: Any, ctx: Iris) -> None:
    """Make `model.generate` of this instance draw the same tokens on every rank, and refuse other uses."""
    if not hasattr(model, "generate"):
        return
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.disable_compile = True
    own = vars(model).get("generate")
    if isinstance(own, MethodType) and hasattr(own.__func__, "agrees"):
        return  # wrapped by an earlier split
    model._own_generate = own  # the checkpoint's, whose code the user trusts

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = _Given(self, ctx, args, kwargs)
        with given.streaming(), ctx.in_this_thread():
            ranks_of(ctx)
            compare(ctx, "generate", assistant_model=given.arguments.get("assistant_model"))
            run_on_stages(
                self,
                "generate",
                lambda: checked(ctx, "generate", given.check, lambda _: given.facts()),
                lambda _: given.facts(),
            )
            if isinstance(given.arguments.get("custom_generate"), str):
                given.arguments.setdefault("trust_remote_code", False)  # else each rank would prompt on its own stdin
            share_generators(self, ctx.device)
            share_rng(ctx)
            own = self._own_generate
            output = type(self).generate(self, **given.arguments) if own is None else own(*args, **kwargs)
            settle(self, ctx)
            checked(ctx, "the end of generate", lambda: facts(tokens=_tokens_of(output)), lambda own: own)
            return output

    vars(generate)["agrees"] = True
    model.generate = MethodType(generate, model)
    if hasattr(model, "_get_logits_processor"):  # ContinuousBatchingManager calls it
        model._get_logits_processor = MethodType(_get_logits_processor, model)
    if hasattr(model, "_get_static_cache_init_shape"):  # it counts the heads of transformers' own splits
        model._get_static_cache_init_shape = MethodType(lambda self: None, model)  # the first update shows them


def _tokens_of(output: Any) -> torch.Tensor | None:
    tokens = getattr(output, "sequences", output)
    return tokens if isinstance(tokens, torch.Tensor) else None


def _get_logits_processor(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
    if not args and not kwargs:  # generate() passes arguments
        name = self.config._attn_implementation or ""
        if name.startswith("paged|"):  # some releases set it before they come here
            self.set_attn_implementation(name.removeprefix("paged|"))
        raise ArgumentError(f"model is split: expected a whole one for a ContinuousBatchingManager; {BATCHING}")
    return type(self)._get_logits_processor(self, generation_config, *args, **kwargs)


class _Streamer:
    """A user's streamer, without its end: that comes after the call, when its reader may use the context."""

    def __init__(self, streamer: Any) -> None:
        self.streamer = streamer

    def put(self, value: torch.Tensor) -> None:
        self.streamer.put(value)

    def end(self) -> None:
        """Do nothing: `_Given.streaming` ends the streamer."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.streamer, name)


class _Given:
    """The arguments of a call of `generate`, by name."""

    def __init__(self, model: Any, ctx: Iris, args: tuple, kwargs: dict[str, Any]) -> None:
        names = list(signature(type(model).generate).parameters)[1:]
        self.model, self.ctx, self.arguments = model, ctx, {**dict(zip(names, args, strict=False)), **kwargs}
        self.configs = self.arguments.get("generation_config"), model.generation_config

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """End the call's streamer after the block, also after an error: its reader waits for that."""
        streamer = self.arguments.get("streamer")
        if streamer is None:
            yield
            return
        self.arguments["streamer"] = _Streamer(streamer)
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the call's own error is raised
                streamer.end()
            raise
        streamer.end()

    def facts(self) -> dict[str, str]:
        """Return the facts that all ranks must share."""
        splits = (each.dtype for each in self.model.modules() if isinstance(each, ShardedLinear))
        dtype = next(splits, self.model.dtype)  # a stage's first parameter may be kept in another
        model = {"model.generation_config": self.model.generation_config, "model.dtype": dtype}
        return facts(**{**self.arguments, **model})

    def setting(self, name: str) -> Any:
        """Return a setting as transformers does: from the call, from its generation config, from the model's."""
        values = self.arguments.get(name), *(getattr(each, name, None) for each in self.configs)
        return next((each for each in values if each is not None), None)

    def check(self) -> None:
        """Raise `ArgumentError` for options on which ranks could differ, or tokens that a GPU must not see."""
        check_plain("generate", self.arguments)
        check_caches(self.model, self.arguments)
        self._check_clocks()
        if self.arguments.get("synced_gpus"):
            raise ArgumentError("synced_gpus is True: expected None or False, because all ranks stop at the same step")
        if self.setting("cache_implementation") == "paged":
            raise ArgumentError(f"cache_implementation is 'paged': expected another for a split model; {BATCHING}")
        self._check_assistant()
        tokens = self.arguments.get("inputs", self.arguments.get("input_ids"))
        if isinstance(tokens, torch.Tensor) and tokens.dim() == 2 and not tokens.is_floating_point():
            self._check_tokens(tokens)
            self._check_length(tokens)

    def _check_clocks(self) -> None:
        criteria = *(self.arguments.get("stopping_criteria") or ()), self._assistants_config()
        clocks = self.setting("max_time"), *(getattr(each, "max_time", None) for each in criteria)
        for max_time in clocks:
            if max_time is not None:
                raise ArgumentError(f"max_time is {max_time}: expected None, ranks' clocks differ; set max_new_tokens")

    def _assistants_config(self) -> Any:
        return getattr(self.arguments.get("assistant_model"), "generation_config", None)

    def _check_assistant(self) -> None:
        assistant = self.arguments.get("assistant_model")
        if not isinstance(assistant, nn.Module) or self.arguments.get("assistant_tokenizer") is None:
            return
        if any(isinstance(each, ShardedLinear) for each in assistant.modules()):
            raise ArgumentError(
                "assistant_model is split, and assistant_tokenizer is given: expected an assistant that is whole on"
                " each rank, because transformers slices rows of its head's weight"
            )

    def _check_tokens(self, tokens: torch.Tensor) -> None:
        config = self.model.config
        text = config.get_text_config() is config  # other models have tokens for images, say
        if text and isinstance(self.model.get_input_embeddings(), nn.Embedding):
            check_tokens("input_ids", tokens, words_of(self.model))

    def _check_length(self, tokens: torch.Tensor) -> None:
        """Check the length of the prompts, padding included, and of the new tokens."""
        if self.model.config.is_encoder_decoder:
            return
        longest = self._new_length(tokens.shape[1])
        if longest is None:
            return
        room = room_of(self.arguments.get("cache", self.arguments.get("past_key_values")))
        if room is not None and longest > room + 1:  # the last token is not stored
            raise ArgumentError(
                f"prompts of {tokens.shape[1]} tokens become {longest}: expected at most {room + 1}, the cache has room"
                f" for {room}"
            )
        if self.setting("cache_implementation") in _STATIC:
            rows = tokens.shape[0] * max(self.setting("num_beams") or 1, self.setting("num_return_sequences") or 1)
            length = max(longest, self.setting("max_cache_len") or 0)
            check_memory(self.model, self.ctx, rows, length, "the rows and the length of a static cache")
        known = positions_known(self.model)
        if known is not None and longest > known:
            mask = self.arguments.get("attention_mask")
            padding = int((mask == 0).sum(-1).min()) if isinstance(mask, torch.Tensor) and mask.dim() == 2 else 0
            if longest - padding > known:
                raise ArgumentError(
                    f"prompts of {tokens.shape[1] - padding} tokens become {longest - padding}: expected at most"
                    f" {known}, the positions that {type(self.model).__name__} has"
                )

    def _new_length(self, length: int) -> int | None:
        """Return the final length of the prompts; None: transformers' default, which respects the positions."""
        new = self.setting("max_new_tokens")
        return length + new if isinstance(new, int) else self.setting("max_length")
