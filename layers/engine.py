"""Generation with a static cache and captured steps, thin enough to read: `Engine(model, ctx).generate(prompts)`.

Drives a split Hugging Face model as it is. The prompts run once through the model, left-padded to one length, and fill
a cache of fixed size. Then each step makes one token a row. A step reads and writes the engine's own tensors only (the
last tokens, their positions, what was generated, how much), so on a GPU it is captured once in a CUDA graph and
replayed: no Python and no host synchronisation between tokens. On CPUs the same step runs eagerly.

Prompts of few tokens take the device less time than the host needs to launch their kernels (25 ms for 32 layers). So on
a GPU those, too, are captured, when a shape comes for the second time (`graphs`): batch, length, with or without
padding. Longer ones gain nothing and run eagerly; a captured one would keep its activations' memory. Where the host is
the limit, lengths are on a grid, so that a graph serves all that are a little shorter: they end with tokens that none
of theirs looks at, and the cache forgets them.

Ranks agree on every token without a word. Logits are gathered by an op that gives every rank the same bits, and the
noise that a sample is drawn with comes from a generator of the engine's own, seeded alike on all ranks. Where to stop
is read from the same tokens.

Layers with a sliding window get a cache of full length too: the mask alone keeps the window, so a step stays the same
whatever the position. Where ranks share the tokens of prompts (`sequence`) but do not divide them, a few tokens that
mean nothing are put behind: attention is causal, and the cache forgets them. Not a server: one batch at a time, all
rows to the end of the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
import inspect
from math import gcd
from numbers import Real
import zlib

from iris.errors import ArgumentError
import torch
from torch import nn

from .cache import cache_name, fits, has_windows, known_empty, shape_of, static_cache
from .compiled import CompiledLayers, decoder_layers
from .graphs import Graphs
from .positions import count_from_zero, positions_known
from .prompts import common_length, padded_before, padded_behind, stops, tokens_of
from .sequence import sharing_of
from .sharded import check_context, flags, positive
from .step_attention import NAME
from .step_attention import use as use_step_attention

_LOOK_EVERY = 16  # steps between looks at the tokens on the host, which cost a synchronisation
_GRAPH_TOKENS = 8192  # of prompts that are captured: of more, the device takes longer than the host
_COLDEST, _HOTTEST = 1e-30, 1e30  # by less, logits overflow; by more, all tokens are alike
_PARTS = 256  # of the vocabulary, at most, whose likeliest tokens are found at the same time


def _untracked(method: Callable) -> Callable:
    """`method` without gradients, nor in inference mode: tensors made there could not be changed outside."""
    return torch.inference_mode(False)(torch.no_grad()(method))


class Engine:
    """Generates with `model`, split over the ranks of `ctx`: up to `batch_size` rows of up to `max_length` tokens.

    `graphs`: whether steps are captured (by default on GPUs). `cache`: another engine's, of the same sizes, to share:
    it holds the batch of one of them at a time.
    `step_attention`: whether a model that uses torch's attention attends by `step_attention`, and in prompts by
    `prompt_attention` (by default on GPUs). `compile`: whether its decoder layers are compiled when they are first
    used, which takes seconds and saves kernels in each step; by inductor, or by the backend of torch.compile that it
    names. `prompt_graphs`: of how many shapes of prompts, up to 8192 tokens in all, graphs are kept, those used last
    (short ones are padded to few lengths); they hold the memory that the largest needs while it runs. None with
    `graphs` or `step_attention` off. What is captured must stay as it is: a model whose modules, hooks or tensors are
    exchanged needs a new engine.
    """

    @_untracked
    def __init__(
        self,
        model: nn.Module,
        ctx,
        batch_size: int = 1,
        max_length: int = 2048,
        *,
        graphs: bool | None = None,
        cache=None,
        step_attention: bool | None = None,
        compile: bool | str = False,
        prompt_graphs: int = 32,
    ):
        check_context(ctx)
        if not isinstance(model, nn.Module) or not hasattr(model, "config"):
            raise ArgumentError(f"model is a {type(model).__name__}: expected a Hugging Face model")
        positive(batch_size=batch_size, max_length=max_length)
        flags(True, graphs=graphs, step_attention=step_attention)
        if (known := positions_known(model)) is not None and max_length > known:
            raise ArgumentError(
                f"max_length is {max_length}: expected at most {known}, the positions that {type(model).__name__} has"
            )
        if isinstance(prompt_graphs, bool) or not isinstance(prompt_graphs, int) or prompt_graphs < 0:
            raise ArgumentError(f"prompt_graphs is {prompt_graphs!r}: expected 0 or a positive integer")
        if getattr(model.config, "is_encoder_decoder", False):
            raise ArgumentError(f"model is a {type(model).__name__}: expected a decoder without an encoder")
        if cache is not None and not fits(cache, shape_of(model, ctx.num_ranks), batch_size, max_length):
            raise ArgumentError(
                f"cache is a {type(cache).__name__}: expected that of an engine of the same sizes, with a like model"
            )
        if not isinstance(compile, (bool, str)) or compile == "":
            raise ArgumentError(f"compile is {compile!r}: expected a bool, or the name of a backend of torch.compile")
        device = torch.device(ctx.device)
        elsewhere = {str(each.device) for each in model.parameters()} - {str(device)}
        if elsewhere and not hasattr(model, "hf_device_map"):  # whose hooks bring them
            raise ArgumentError(f"model has parameters on {', '.join(sorted(elsewhere))}: expected all on {device}")
        if not count_from_zero(model, device):
            raise ArgumentError(
                f"model is a {type(model).__name__}, whose positions do not begin at 0: use its generate()"
            )
        self.model, self.ctx, self.batch_size, self.max_length = model.eval(), ctx, batch_size, max_length
        self.graphs = device.type == "cuda" if graphs is None else graphs
        if self.graphs and device.type != "cuda":
            raise ArgumentError(f"graphs is True: expected False on {device.type}, which has no CUDA graphs")
        wanted = device.type == "cuda" if step_attention is None else step_attention
        # Under capture, transformers' own attention masks what needs no mask, and takes longer for it.
        capturable = wanted and use_step_attention(model) and self.graphs
        self._sharing = sharing_of(model)
        self.cache = static_cache(model, ctx.num_ranks, max_length) if cache is None else cache
        self._cache_name = cache_name(model)
        like = {"dtype": torch.long, "device": device}
        self.tokens = torch.zeros(batch_size, 1, **like)  # the last of each row, not yet seen by the model
        self.positions = torch.zeros(batch_size, 1, **like)
        self.mask = torch.zeros(batch_size, max_length, dtype=torch.bool, device=device)  # where the cache has tokens
        self.filled = torch.zeros(1, **like)  # of the cache, padding included
        self.output = torch.zeros(batch_size, max_length, **like)  # what was generated ...
        self.count = torch.zeros(1, **like)  # ... and how many of each row
        self.temperature = torch.ones((), device=device)
        self.top_p = torch.ones((), device=device)
        self._greedy = True
        self._random = torch.Generator(device)
        # As a step's attention takes it; with windows, or another attention, the model makes its own masks of it.
        own = model.config._attn_implementation in ("sdpa", NAME) and not has_windows(model.config)
        self._seen = self.mask[:, None, None] if own else self.mask
        self._keeps_any = "Tensor" in str(_annotation(model, "logits_to_keep"))  # else so many from the end, or all
        self._layer_weights = sum(each.numel() for each in model.parameters()) / len(self.cache.layers)
        self.steps = Graphs(2 if self.graphs else 0)
        self.prompts = Graphs(prompt_graphs if capturable else 0)
        self._shape: torch.Size | None = None  # of logits, once prompts are read
        self._compiled: CompiledLayers | None = None
        if compile:
            self._compile("inductor" if compile is True else compile)

    @_untracked
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
        """The tokens that follow each prompt; a row ends after one of the `stop` tokens. Every rank gives the same.

        Collective, with the same arguments on all ranks, which IRIS_DEBUG=1 compares.

        `temperature` 0 takes the likeliest token. Above, tokens are drawn among the likeliest that hold `top_p` of
        the probability, by rank 0's `seed`, which torch's generator there draws if there is none. Raises
        `ArgumentError` for bad arguments, and for prompts that with the new tokens are longer than `max_length`.
        """
        positive(max_new_tokens=max_new_tokens)
        numbers = isinstance(temperature, Real) and isinstance(top_p, Real)
        if not numbers or not temperature >= 0 or not 0 < top_p <= 1:
            raise ArgumentError(
                f"temperature, top_p are {temperature!r}, {top_p!r}: expected 0 or more, and 0 < top_p <= 1"
            )
        if isinstance(seed, bool):
            raise ArgumentError(f"seed is {seed!r}: expected None or an integer of 64 bits")
        ends = stops(stop)
        prompts = tokens_of(prompts, self.model.get_input_embeddings().weight.shape[0])
        rows, mask = padded_before(prompts, max_new_tokens, self.batch_size, self.max_length)
        rows, mask = (None if each is None else each.to(self.tokens.device) for each in (rows, mask))
        asked = {"temperature": temperature, "top_p": top_p, "stop": sorted(ends), "max_new_tokens": max_new_tokens}
        self.ctx.compare("Engine.generate", lengths=[len(row) for row in prompts], **asked, tokens=_checksum(prompts))
        self._greedy = temperature == 0
        if not self._greedy:
            self.temperature.fill_(min(max(temperature, _COLDEST), _HOTTEST))
            self.top_p.fill_(top_p)
            seed = self.ctx.broadcast(int(torch.randint(2**63 - 1, ())) if seed is None else seed)
            if not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
                raise ArgumentError(f"seed is {seed!r} on rank 0: expected None or an integer of 64 bits")
            self._random.manual_seed(seed)
        self.reset()
        self.accept(self.prefill(rows, mask))
        made = 1
        while made < max_new_tokens and not (ends and self._ended(made, ends, len(prompts))):
            steps = min(max_new_tokens - made, _LOOK_EVERY if ends else max_new_tokens)
            self.decode(steps)
            made += steps
        tokens = self.output[: len(prompts), :made].tolist()
        self.ctx.check()  # a replay asks for no failure
        return [_until(row, ends) for row in tokens]

    def reset(self) -> None:
        """Forgets the batch."""
        self.cache.holder = self._shape = None
        self.cache.reset()
        self.count.zero_()
        self.mask.fill_(False)

    @_untracked
    def prefill(self, prompts: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [batch_size, vocabulary] after `prompts` [batch_size, length]; `mask` is False where padded, in front.

        The batch before must have been forgotten (`reset`). Replayed if a graph is kept of prompts of that shape, or of
        the length that they are padded to.
        Raises `ArgumentError` where it is not, for tensors of another kind, and for a mask that ends with padding; that
        tokens are of the vocabulary is not checked.
        """
        return self._first(self._replayed, prompts, mask)

    @_untracked
    def read(self, prompts: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """What `prefill` does, eagerly and without padding to a length that others have: so it may round elsewhere."""
        return self._first(self._read, prompts, mask)

    def _first(self, read: Callable, prompts: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """What `read` makes of a batch's prompts."""
        self._check_prompts(prompts, mask)
        self.cache.holder = self.tokens  # be it half of them, where reading fails
        logits = read(prompts, mask)
        self._shape = logits.shape
        return logits

    def _replayed(self, prompts: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if not self.prompts.most or prompts.numel() > _GRAPH_TOKENS:
            return self._read(prompts, mask)
        batch, length = prompts.shape
        end = None
        if self._keeps_any:
            end = torch.full((1,), length, device=prompts.device)
            longer = common_length(batch, length, self._layer_weights)
            most = self.max_length - 1  # those that fill the cache are compiled apart
            longer = max(length, min(longer, most - most % self._step(batch)))
            if batch * longer <= _GRAPH_TOKENS:
                prompts, mask = padded_behind(prompts, mask, longer)
        prompts, mask = prompts.contiguous(), None if mask is None else mask.contiguous()  # as a graph's own
        key = prompts.shape, prompts.dtype, None if mask is None else mask.dtype
        with self._sharing.replaying() if self._sharing else nullcontext():
            return self.prompts.run(key, self._read, prompts, mask, end).clone()  # the next graph may overwrite it

    def _read(self, prompts: torch.Tensor, mask: torch.Tensor | None, end: torch.Tensor | None = None) -> torch.Tensor:
        """`end` [1]: how long the prompts are, where less than their tensor is; what is behind means nothing."""
        batch, length = prompts.shape
        prompts, mask = padded_behind(prompts, mask, self._sharable(batch, length))
        keep = prompts.shape[1] - length + 1 if end is None else end - 1
        end = torch.full((1,), length, device=prompts.device) if end is None else end
        seen = (torch.arange(prompts.shape[1], device=prompts.device) < end).expand(prompts.shape)
        seen = seen if mask is None else seen & mask.bool()
        self.mask[:, : prompts.shape[1]] = seen
        self.filled.copy_(end)
        # what is behind has the last one's position: some rotary embeddings go by the largest
        positions = (seen.cumsum(-1) - 1).clamp(min=0)
        self.positions.copy_(positions[:, -1:] + 1)
        with known_empty(self.cache):
            logits = self._logits(prompts, mask, positions, keep)
        if not isinstance(keep, int) or keep > 1:  # the cache has what is behind
            lengths = [each.cumulative_length for each in self.cache.layers]
            over = (prompts.shape[1] - end).to(lengths[0].dtype).view_as(lengths[0])
            torch._foreach_sub_(lengths, [over] * len(lengths))
        return logits

    def _check_prompts(self, prompts: torch.Tensor, mask: torch.Tensor | None) -> None:
        if self.cache.holder is not None:
            raise ArgumentError("prompts come behind others in the engine's cache: expected reset() before them")
        rows, device, whole = self.batch_size, self.tokens.device, (torch.long, torch.int)
        for name, given, dtypes in (("prompts", prompts, whole), ("mask", mask, (torch.bool, *whole))):
            if given is None and name == "mask":
                continue
            if not isinstance(given, torch.Tensor):
                raise ArgumentError(f"{name} is a {type(given).__name__}: expected a tensor of {dtypes[0]}")
            fits = given.dim() == 2 and given.shape[0] == rows and 0 < given.shape[1] <= self.max_length
            if given.dtype not in dtypes or given.device != device or not fits or given.shape != prompts.shape:
                length = f"1 to {self.max_length}" if given is prompts else prompts.shape[1]
                raise ArgumentError(
                    f"{name} is {list(given.shape)} of {given.dtype} on {given.device}: expected [{rows}, {length}] of"
                    f" {dtypes[0]} on {device}"
                )
        if mask is not None and not mask[:, -1].all():  # whose logits would be those of padding
            raise ArgumentError("mask is False at the end of a row: expected padding in front of the prompts")

    def _sharable(self, batch: int, length: int) -> int:
        """The next length at which ranks can share the tokens, if the model does and there are enough."""
        if self._sharing is None or not self._sharing.suits(batch * length):
            return length
        longer = -(-length // self._step(batch)) * self._step(batch)
        return longer if longer <= self.max_length else length

    def _step(self, batch: int) -> int:
        """Between lengths at which ranks that share tokens have as many each."""
        return 1 if self._sharing is None else self.ctx.num_ranks // gcd(batch, self.ctx.num_ranks)

    @_untracked
    def accept(self, logits: torch.Tensor) -> None:
        """Chooses the next token of each row by its `logits`, those of `prefill` or others of their shape.

        Raises `ArgumentError` for another shape or device, and where no prompts have been read since the last `reset`.
        """
        self._expect_prompts()
        if not isinstance(logits, torch.Tensor):
            raise ArgumentError(f"logits is a {type(logits).__name__}: expected a tensor")
        if logits.shape != self._shape or logits.device != self.tokens.device:
            raise ArgumentError(
                f"logits is {list(logits.shape)} on {logits.device}: expected {list(self._shape)} on"
                f" {self.tokens.device}"
            )
        self.tokens.copy_(self._choose(logits))
        self.output.index_copy_(1, self.count, self.tokens)
        self.count += 1

    @_untracked
    def decode(self, steps: int = 1) -> None:
        """Makes `steps` more tokens in each row. The first step of a kind runs eagerly, and the second is captured.

        That they fit behind the prompts in `max_length` is not checked here, as it is in `generate`. Raises
        `ArgumentError` where no prompts have been read since the last `reset`.
        """
        positive(steps=steps)
        self._expect_prompts()
        for _ in range(steps):
            self.logits = self.steps.run(self._greedy, self.step, random=None if self._greedy else self._random)

    @_untracked
    def step(self) -> torch.Tensor:
        """One token a row, eagerly, on the engine's own tensors; the logits that they were chosen from."""
        self._expect_prompts()
        self.mask.index_fill_(1, self.filled, True)
        logits = self._logits(self.tokens, self._seen, self.positions)
        torch._foreach_add_([self.positions, self.filled], 1)
        self.accept(logits)
        return logits

    def _expect_prompts(self) -> None:
        if self._shape is None:
            raise ArgumentError("the engine holds no prompts: expected prefill() or read() since the last reset()")
        if self.cache.holder is not self.tokens:
            raise ArgumentError("another engine has used the cache that both share: expected reset(), and prompts anew")

    def _logits(self, tokens, mask, positions, keep: torch.Tensor | int = 1) -> torch.Tensor:
        """Of one token a row, so many from the end or at `keep` [1]: the head's product is the largest there is."""
        with nullcontext() if self._compiled is None else self._compiled.serving(tokens.shape[1]):
            result = self.model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                **{self._cache_name: self.cache},
                use_cache=True,
                logits_to_keep=keep,
            )
        return result.logits[:, 0 if isinstance(keep, torch.Tensor) else -keep]  # some make all of them

    @_untracked
    def _compile(self, backend: str) -> None:
        layers = decoder_layers(self.model, len(self.cache.layers))
        if not all(each.is_initialized for each in self.cache.layers):
            self.mask.fill_(True)
            self._logits(self.tokens, self._seen, self.positions)  # allocates them, which a compiled layer could not
            self.reset()
        self._compiled = CompiledLayers(self.model, layers, self.cache, backend)

    def _choose(self, logits: torch.Tensor) -> torch.Tensor:
        if self._greedy:
            return _likeliest(logits)
        likeliest, order = (logits.float() / self.temperature).softmax(-1).sort(descending=True, stable=True)
        before = likeliest.cumsum(-1) - likeliest
        kept = likeliest.masked_fill(before >= self.top_p, 0)
        # Of independent exponential arrivals with these rates, each is first with the probability of its rate.
        arrivals = torch.empty_like(kept).exponential_(generator=self._random)
        return order.gather(-1, (kept / arrivals).argmax(-1, keepdim=True))

    def _ended(self, made: int, ends: set[int], rows: int) -> bool:
        return all(ends.intersection(row) for row in self.output[:rows, :made].tolist())


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """`logits.argmax(-1, keepdim=True)` of [rows, vocabulary], in two steps: torch gives each row one program."""
    parts = gcd(logits.shape[-1], _PARTS)
    best, at = logits.unflatten(-1, (parts, -1)).max(-1)
    part = best.argmax(-1, keepdim=True)
    return part * (logits.shape[-1] // parts) + at.gather(-1, part)


def _annotation(model: nn.Module, name: str) -> object:
    """What `model` says that it takes by this name; None if nothing."""
    known = inspect.signature(model.forward).parameters.get(name)
    return None if known is None or known.annotation is known.empty else known.annotation


def _checksum(prompts: list[list[int]]) -> int:
    return zlib.crc32(repr(prompts).encode())


def _until(row: list[int], ends: set[int]) -> list[int]:
    at = next((i for i, token in enumerate(row) if token in ends), len(row))
    return row[: at + 1]
