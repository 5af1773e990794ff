"""Generation with a static cache and captured steps: `Engine(model, ctx).generate(prompts)`.

The engine drives an unmodified split Hugging Face model. The prompts run once through the model, left-padded to one
length, and fill a cache of fixed size. Then each step generates one token a row. A step reads and writes the engine's
own tensors only (the last tokens, their positions, the output and its length). So on a GPU it is captured once in a
CUDA graph and replayed: no Python and no host synchronisation between tokens. On CPUs the same step runs eagerly.

Prompts of few tokens take the device less time than the host needs to launch their kernels (25 ms for 32 layers). So on
a GPU those, too, are captured, when a shape comes for the second time (`graphs`): batch, length, with or without
padding. Longer ones gain nothing and run eagerly, because a captured one would keep its activations' memory. Where the
host is the limit, lengths are rounded up to a grid, so that one graph runs all lengths that are a little shorter. Such
a prompt is padded at its end with tokens that it does not attend to, and the cache drops them.

Ranks choose the same tokens without an exchange. An op gathers the logits and gives every rank the same bits. The noise
of a sample comes from the engine's own generator, with the same seed on all ranks. Every rank stops by the same tokens.

Layers with a sliding window get a cache of full length, too: the mask alone keeps the window, so a step stays the same
whatever the position. Layers that keep a state of fixed size run unchanged (`cache`), on prompts eagerly. With
sequence parallelism (`sequence`) the ranks must divide the tokens of a prompt, so a few are appended: attention is
causal, and the cache drops them. This is not a server: it takes one batch at a time, to the end of the longest row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from iris.all_hosts import AllHosts
from iris.errors import ArgumentError, IrisError
from iris.memory.outputs import GraphOutputs
import torch
from torch import nn

from ..digests import compare
from ..gradients import untracked
from ..hf.sequence import sharing_of
from ..pipeline.stage import settle, share_seed
from ..sharded import flags, positive, ranks_of
from . import attention
from .arguments import (
    check_logits,
    check_model,
    check_no_autocast,
    check_options,
    check_prompts,
    check_sizes,
    checked_graphs,
)
from .cache import (
    attending,
    cache_name,
    drop_last_tokens,
    is_compatible,
    known_empty,
    recurrent,
    shape_of,
    static_cache,
)
from .compiled import CompiledLayers, decoder_layers
from .graphs import Graphs
from .lengths import GRAPH_TOKENS, Lengths
from .prompts import ended, pad_right, until
from .requests import Request, checked_request
from .rope_switch import RopeSwitch
from .sampling import Sampler
from .served import check_compilable, first_call, keeps_any_logits, needs_full_masks

if TYPE_CHECKING:
    from iris.context import Iris
    from transformers import StaticCache

_LOOK_EVERY = 16  # steps between looks at the tokens on the host, which cost a synchronisation


class Engine:
    """Generate tokens for one batch with a split model, from a static cache and CUDA graphs.

    Args:
        model: a model that `layers.parallelize` or `layers.from_pretrained` has split over `ctx`.
        ctx: the context.
        batch_size: the largest number of rows.
        max_length: the largest number of tokens of a row, prompt included.
        graphs: whether steps are captured in a CUDA graph; by default on GPUs.
        cache: the cache of another engine of the same sizes, to share. It holds the batch of one of them at a time.
        step_attention: whether this library's attention kernels replace torch's; by default on GPUs.
        compile: whether decoder layers are compiled at their first use, which takes seconds; True for inductor, or the
            name of a torch.compile backend.
        prompt_graphs: how many shapes of prompts, up to 8192 tokens, keep a CUDA graph. Short prompts are padded to few
            lengths. Without `graphs` or `step_attention` there are none.

    A graph replays what it captured: after replacing modules, hooks or tensors of the model, make a new engine.

    Raises:
        ArgumentError: for bad arguments, and for models that an engine does not support, with the layer's name.
    """

    @untracked
    def __init__(
        self,
        model: nn.Module,
        ctx: Iris,
        batch_size: int = 1,
        max_length: int = 2048,
        *,
        graphs: bool | None = None,
        cache: StaticCache | None = None,
        step_attention: bool | None = None,
        compile: bool | str = False,
        prompt_graphs: int = 32,
    ):
        ctx = ranks_of(ctx)
        device = torch.device(ctx.device)
        flags(True, graphs=graphs, step_attention=step_attention)
        check_options(prompt_graphs, compile)
        check_model(model, device)
        check_sizes(model, ctx, batch_size, max_length)
        options = {"graphs": graphs, "step_attention": step_attention, "compile": compile}
        compare(ctx, "Engine", batch_size=batch_size, max_length=max_length, prompt_graphs=prompt_graphs, **options)
        if cache is not None and not is_compatible(cache, shape_of(model, ctx.num_ranks), batch_size, max_length):
            raise ArgumentError(
                f"cache is a {type(cache).__name__}: expected that of an engine of the same sizes, with an equal model"
            )
        self.model, self.ctx, self.batch_size, self.max_length = model.eval(), ctx, batch_size, max_length
        check_no_autocast(device.type)
        line = ctx.line if isinstance(ctx, AllHosts) else None
        watch = None if line is None else line.watch
        self.graphs = checked_graphs(graphs, device, line)
        capturable = attention.install(model, ctx, step_attention, self.graphs)
        self._sharing = sharing_of(model)
        self.cache = static_cache(model, ctx.num_ranks, max_length) if cache is None else cache
        self._recurrent = bool(recurrent(self.cache))  # a state includes padding after a prompt, so there may be none
        self._cache_name = cache_name(model)
        like: dict[str, Any] = {"dtype": torch.long, "device": device}
        self.tokens = torch.zeros(batch_size, 1, **like)  # the last of each row, not yet seen by the model
        self.positions = torch.zeros(batch_size, 1, **like)
        self.mask = torch.zeros(batch_size, max_length, dtype=torch.bool, device=device)  # where the cache has tokens
        self.filled = torch.zeros(1, **like)  # of the cache, padding included
        self.output = torch.zeros(batch_size, max_length, **like)  # tokens that were generated ...
        self.count = torch.zeros(1, **like)  # ... and their number in each row
        self.sampler = Sampler(device)
        self._switch = RopeSwitch.of(model, self.output)
        self._full_masks = needs_full_masks(model)
        # Shaped for a step's attention; with windows, or another attention, the model derives its own masks.
        shaped = attention.takes_step_masks(model) and not self._full_masks
        self._seen = self.mask[:, None, None] if shaped else self.mask
        self._masks_steps = bool(attending(self.cache))  # a masked state would be masked once for each token
        self._tried: set[tuple[bool, bool]] = set()  # kinds of calls that have run
        self._keeps_any = keeps_any_logits(model)  # else this many from the end, or all
        layer_weights = sum(each.numel() for each in model.parameters()) / len(self.cache.layers)
        self._lengths = Lengths(max_length, ctx.num_ranks, layer_weights, self._sharing, self._recurrent)
        captures = self.graphs and self._switch is None  # its rotary embedding makes new factors at the switch
        self.steps = Graphs(2 if captures else 0, after=watch)
        # Prompts are long enough for overlapped ops, whose outputs then lie on the heap as long as the graphs.
        self.prompts = Graphs(
            prompt_graphs if capturable and captures and not self._recurrent else 0,
            around=partial(ctx.ops.outputs.keeping, GraphOutputs()),
            after=watch,
        )
        self._shape: torch.Size | None = None  # of logits, once prompts are read
        self._cached = self._generated = 0  # tokens of each row in the cache, and in `output`, as the host counts them
        self._compiled: CompiledLayers | None = None
        if compile:
            self._compile("inductor" if compile is True else compile)

    @untracked
    def generate(
        self,
        prompts: torch.Tensor | Sequence[Sequence[int]],
        max_new_tokens: int = 32,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: int | Iterable[int] | None = None,
    ) -> list[list[int]]:
        """Return the tokens that follow each prompt. Collective; every rank returns the same.

        The ranks compare their arguments. A thread other than the context's may call it.

        Args:
            prompts: token ids, [batch, length] or lists of different lengths.
            max_new_tokens: the largest number of new tokens of a row.
            temperature: 0 takes the most likely token; above, tokens are sampled.
            top_p: samples come from the most likely tokens that hold this share of the probability.
            seed: seed of the samples; rank 0's counts. None takes it from torch's generator.
            stop: token ids that end a row; they are included in it.

        Returns:
            A list of token ids for each prompt.

        Raises:
            ArgumentError: on every rank, for bad arguments, arguments that differ between ranks, and prompts that with
                the new tokens exceed `max_length`.
        """
        with self.ctx.in_this_thread():
            request = checked_request(self, prompts, max_new_tokens, temperature, top_p, seed, stop)
            try:
                return self._generate(request, max_new_tokens, temperature, top_p, seed)
            except IrisError:
                raise
            except RuntimeError:  # of a device whose transfers have ended because a host was lost
                settle(self.model, self.ctx)
                raise

    def _generate(
        self, request: Request, max_new_tokens: int, temperature: float, top_p: float, seed: int | None
    ) -> list[list[int]]:
        self.sampler.set(temperature, top_p)
        if not self.sampler.greedy:
            self.sampler.share_seed(self.ctx, share_seed(self.model, seed))
        self.reset()
        self.accept(self._first(self._replayed, request.prompts, request.mask))
        generated, ends = 1, request.ends
        while generated < max_new_tokens and not (ends and ended(self.output[: request.count, :generated], ends)):
            steps = min(max_new_tokens - generated, _LOOK_EVERY if ends else max_new_tokens)
            self.decode(steps)
            generated += steps
        tokens = self.output[: request.count, :generated].tolist()
        settle(self.model, self.ctx)
        self.ctx.check()  # a replay does not check for failures
        return [until(row, ends) for row in tokens]

    def reset(self) -> None:
        """Clear the batch, so that new prompts can be read."""
        self.cache.holder = self._shape = None
        self._cached = self._generated = 0
        self.cache.reset()
        self.count.zero_()
        self.mask.fill_(False)

    @untracked
    def prefill(self, prompts: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Read prompts and return the logits of the next token. Replays a CUDA graph where one matches.

        Args:
            prompts: int64 [batch_size, length], padded in front.
            mask: bool [batch_size, length], False where padded; None without padding.

        Returns:
            Logits [batch_size, vocabulary].

        Raises:
            ArgumentError: if the previous batch was not cleared by `reset`, for tensors of another kind, for tokens
                outside the vocabulary, and for padding at the end.
        """
        self._check_prompts(prompts, mask)
        return self._first(self._replayed, prompts, mask)

    @untracked
    def read(self, prompts: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Read prompts as `prefill` does, but eagerly and without padding to another length, so rounding may differ.

        Args:
            prompts: as in `prefill`.
            mask: as in `prefill`.

        Returns:
            Logits [batch_size, vocabulary].
        """
        self._check_prompts(prompts, mask)
        return self._first(self._read, prompts, mask)

    def _first(self, read: Callable, prompts: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the logits of `read` for a batch's prompts, which are checked."""
        self.cache.holder = self.tokens  # also where reading fails halfway
        if self._switch is not None:
            self._switch.begin(prompts, mask)
        logits = read(prompts, mask)
        self._shape, self._cached = logits.shape, prompts.shape[1]
        return logits

    def _replayed(self, prompts: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if not self.prompts.most or prompts.numel() > GRAPH_TOKENS:
            return self._read(prompts, mask)
        batch, length = prompts.shape
        end = None
        if self._keeps_any:
            end = torch.full((1,), length, device=prompts.device)
            prompts, mask = pad_right(prompts, mask, self._lengths.captured(batch, length))
        prompts, mask = prompts.contiguous(), None if mask is None else mask.contiguous()  # as a graph's own
        key = prompts.shape, prompts.dtype, None if mask is None else mask.dtype
        with self._sharing.replaying() if self._sharing else nullcontext():
            return self.prompts.run(key, self._read, prompts, mask, end).clone()  # the next graph may overwrite it

    def _read(self, prompts: torch.Tensor, mask: torch.Tensor | None, end: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits of the prompts. `end` [1]: their length, where shorter than the tensor; the rest is padding."""
        batch, length = prompts.shape
        prompts, mask = pad_right(prompts, mask, self._lengths.sharable(batch, length))
        keep = prompts.shape[1] - length + 1 if end is None else end - 1
        end = torch.full((1,), length, device=prompts.device) if end is None else end
        seen = (torch.arange(prompts.shape[1], device=prompts.device) < end).expand(prompts.shape)
        seen = seen if mask is None else seen & mask.bool()
        self.mask[:, : prompts.shape[1]] = seen
        self.filled.copy_(end)
        # padding has the last token's position: some rotary embeddings depend on the largest
        positions = (seen.cumsum(-1) - 1).clamp(min=0)
        self.positions.copy_(positions[:, -1:] + 1)
        with known_empty(self.cache):
            logits = self._logits(prompts, self.mask if self._full_masks else mask, positions, keep)
        if not isinstance(keep, int) or keep > 1:  # the cache has the padding, too
            drop_last_tokens(self.cache, prompts.shape[1] - end)
        return logits

    def _check_prompts(self, prompts: torch.Tensor, mask: torch.Tensor | None) -> None:
        check_no_autocast(self.tokens.device.type)
        if self.cache.holder is not None:
            raise ArgumentError("the engine's cache still holds earlier prompts: expected reset() first")
        compare(self.ctx, "Engine", prompts=prompts, mask=mask)
        check_prompts(self.model, prompts, mask, self.batch_size, self.max_length, self.tokens.device)

    @untracked
    def accept(self, logits: torch.Tensor) -> None:
        """Choose the next token of each row by its `logits`.

        Args:
            logits: the result of `prefill`, or others of the same shape.

        Raises:
            ArgumentError: for another shape or device, and if no prompts have been read since the last `reset`.
        """
        check_logits(logits, self._expect_prompts(), self.tokens.device)
        compare(self.ctx, "Engine.accept", logits=logits)
        if self._generated == self.max_length:
            raise ArgumentError(
                f"the engine has generated {self._generated} tokens, its max_length: expected reset() and new prompts"
            )
        self._generated += 1
        self._accept(logits)

    def _accept(self, logits: torch.Tensor) -> None:
        self.tokens.copy_(self.sampler.choose(logits))
        self.output.index_copy_(1, self.count, self.tokens)
        self.count += 1

    @untracked
    def decode(self, steps: int = 1) -> None:
        """Generate `steps` more tokens in each row. The first step of a kind runs eagerly, and the second is captured.

        Args:
            steps: the number of tokens a row.

        Raises:
            ArgumentError: if no prompts were read since the last `reset`, or if rows would exceed `max_length`.
        """
        positive(steps=steps)
        self._expect_prompts()
        compare(self.ctx, "Engine.decode", steps=steps)
        self._make_room(steps)
        for _ in range(steps):
            self.logits = self._advance(self._replayed_step)

    def _replayed_step(self) -> torch.Tensor:
        return self.steps.run(self.sampler.greedy, self._one_step, random=self.sampler.generator)

    @untracked
    def step(self) -> torch.Tensor:
        """Generate one token a row, eagerly, and return the logits that it was chosen from.

        Returns:
            Logits [batch_size, vocabulary].
        """
        self._expect_prompts()
        self._make_room(1)
        return self._advance(self._one_step)

    def _advance(self, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the logits of `step`, or of all tokens read again where the rotary embedding changes."""
        if self._switch is None or not self._switch.passes(self.tokens):
            return step()
        self.cache.reset()
        logits = self._read(*self._switch.all_tokens())  # which sets the mask anew
        self._accept(logits)
        return logits

    def _one_step(self) -> torch.Tensor:
        self.mask.index_fill_(1, self.filled, True)
        logits = self._logits(self.tokens, self._seen if self._masks_steps else None, self.positions)
        torch._foreach_add_([self.positions, self.filled], 1)
        self._accept(logits)
        return logits

    def _make_room(self, steps: int) -> None:
        """Count `steps` more tokens in each row, if they fit: on a GPU, a write past the end ends the process."""
        most = self.max_length - max(self._cached, self._generated)
        if steps > most:
            raise ArgumentError(
                f"steps is {steps} after {self._cached} tokens: expected at most {most}, max_length is "
                f"{self.max_length}"
            )
        self._cached, self._generated = self._cached + steps, self._generated + steps

    def _expect_prompts(self) -> torch.Size:
        """Return the shape of the logits of the prompts that the engine holds. Raises where it holds none."""
        check_no_autocast(self.tokens.device.type)
        if self._shape is None:
            raise ArgumentError("the engine holds no prompts: expected prefill() or read() since the last reset()")
        if self.cache.holder is not self.tokens:
            raise ArgumentError("another engine has overwritten the shared cache: expected reset() and new prompts")
        return self._shape

    def _logits(
        self, tokens: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor, keep: torch.Tensor | int = 1
    ) -> torch.Tensor:
        """Return logits of one token a row, `keep` from the end or at `keep` [1]: the head has the largest product."""
        kind = tokens.shape[1] == 1, mask is None
        trying = nullcontext() if kind in self._tried else first_call(self.model, self.cache)
        with trying, nullcontext() if self._compiled is None else self._compiled.serving(tokens.shape[1]):
            result = self.model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                **{self._cache_name: self.cache},
                use_cache=True,
                logits_to_keep=keep,
            )
        self._tried.add(kind)
        return result.logits[:, 0 if isinstance(keep, torch.Tensor) else -keep]  # some compute all of them

    @untracked
    def _compile(self, backend: str) -> None:
        check_compilable(self.model, self.cache, backend)
        layers = decoder_layers(self.model, len(self.cache.layers))
        if not all(each.is_initialized for each in self.cache.layers):
            self.mask.fill_(True)
            self._logits(self.tokens, self._seen, self.positions)  # allocates, as a compiled layer could not
            self.reset()
        self._compiled = CompiledLayers(self.model, layers, self.cache, backend)
