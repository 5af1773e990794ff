"""`from_pretrained(path, ctx)`: a split Hugging Face model, of which each rank reads only its slices from the files.

1. The folder and the files' headers are checked (`folder`, `files`), quantised weights are recognised (`formats`), and
   the model is built empty, on meta, from its configuration (`configuration`).
2. The headers are compared with it. What is missing, left over or wrongly shaped is listed in one error, and every rank
   raises the same.
3. `parallelize` swaps the Linears, still empty.
4. Parameters are allocated and filled one by one, in the order of the files: the peak is this rank's part of the model,
   and two buffers of a few rows (`buffers`).
5. Buffers that no file holds (rotary frequencies) are computed by the model's own initialisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iris.errors import ArgumentError, CheckpointError, PlatformError
import torch
from torch import nn

from ..expert_storage import coded_weight
from ..formats.registry import scheme_of
from ..formats.scheme import Contents, Kept, contents
from ..formats.weight_format import quantised_weights
from ..hf.options import Keywords, Options
from ..hf.parallelize import split_layers
from ..hf.tied import retie
from ..pipeline.cut import Part, cut
from ..pipeline.mesh import Place, facts_of, place_in
from ..pipeline.stage import connect
from ..shard import fill
from ..sharded import flags, keep_units, part_of, ranks_of, split_parameter
from ..together import agree, one_line, raise_together, run_together, shown
from ..weight_storage import Quantised
from . import names
from .buffers import Staging
from .composed import Source
from .configuration import DTYPES, empty_model, read_config
from .files import Checkpoint
from .folder import check_contents
from .verify import compare_with_files

if TYPE_CHECKING:
    from iris.context import Iris
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import GenerationMixin, PreTrainedModel
    from typing_extensions import Unpack

    from ..hf.report import Report

    class SplitModel(PreTrainedModel, GenerationMixin):
        """The model as type checkers see it; transformers chooses its class at run time."""

        parallel_report: Report


def from_pretrained(
    path_or_id: str | Path,
    ctx: Iris,
    *,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    trust_remote_code: bool = False,
    verify: bool = False,
    mesh: DeviceMesh | None = None,
    **options: Unpack[Keywords],
) -> SplitModel:
    """Load a model that generates text, split over the ranks of `ctx` by its tensor-parallel plan. Collective.

    No code that comes with the model runs, neither its own nor a kernel of the hub, unless `trust_remote_code` allows
    it.

    Args:
        path_or_id: a folder, which needs no network, or a name on the Hugging Face hub.
        ctx: the context.
        dtype: the dtype of weights that are not kept quantised; by default the configuration's.
        strict: whether tensors that the model does not need are an error.
        trust_remote_code: whether code that comes with the model may run.
        verify: whether to compare a weight of each kind with the files after loading (see `checkpoint.verify`).
        mesh: as in `parallelize`; with a "pp" dimension, a rank reads only its slices of its own stage's layers.
        **options: the other options of `parallelize`. Split linears keep quantized weights as stored, in the formats
            that docs/guides/quantised.md lists; `weights="widened"` converts all of them to `dtype`.

    Returns:
        The model in eval mode: a causal language model, an encoder-decoder, or a model of text and images. Its
            `parallel_report` lists how each module is split.

    Raises:
        ArgumentError: on every rank, before anything is read, for arguments that are wrong on any rank, or differ from
            rank 0's.
        CheckpointError: on every rank, before anything is loaded, if the files do not hold what the model needs, or,
            with `strict`, if they hold more.
    """
    ctx = ranks_of(ctx)
    own = {"strict": strict, "trust_remote_code": trust_remote_code, "verify": verify}
    place = place_in(mesh, ctx)
    if place is None:
        return _load_split(path_or_id, ctx, None, dtype, own, options)[0]
    model, part = place.run(
        "from_pretrained",
        partial(_load_split, path_or_id, ctx, place, dtype, own, options),
        lambda result: facts_of(result[0], Options(**options), dtype or result[0].config.dtype),
    )
    connect(model, place, part)
    return model


def _load_split(
    path_or_id: str | Path, ctx: Iris, place: Place | None, dtype: torch.dtype | None, own: dict[str, Any],
    options: Keywords,
) -> tuple[SplitModel, Part | None]:  # fmt: skip
    """Return the model and None, or its stage and that stage's layers. `own`: flags of `from_pretrained`, by name."""
    strict, trust_remote_code = own["strict"], own["trust_remote_code"]
    requested = {"dtype": dtype, **own, **options}
    refusal = _refusal(path_or_id, dtype, own, options)
    agree(ctx, refusal, {"path_or_id": None if refusal else _place(path_or_id), **requested})
    folder, name = _folder(path_or_id, trust_remote_code, ctx), shown(str(path_or_id))
    with _in_turn(ctx, trust_remote_code):
        model, checkpoint, held, problems = _read(folder, Staging(ctx.device), dtype, strict, trust_remote_code)
    try:
        raise_together(problems, f"{name} cannot be loaded", ctx)
        part = None
        if place is not None and place.stages > 1:
            part = run_together(ctx, lambda: cut(model, place.stage, place.stages))
            held.sources = part.here(model, held.sources)
        chosen = Options(**options)
        report = split_layers(model, ctx, chosen if part is None else part.served(chosen), held.sources)
        try:
            for target, source in _progress(held.sources, ctx):
                _load(model, target, source, ctx.device)
            _tie(model, held.sources, ctx.device)
            _compute_buffers(model, ctx.device)
        except Exception as error:  # a file, or memory of the device; the other ranks wait in `raise_together`
            problems = [f"rank {ctx.cur_rank}: {one_line(error)}"]
        raise_together(problems, f"{name} cannot be read", ctx)
        if own["verify"]:
            report = replace(report, verified=compare_with_files(model, held.sources, name, ctx))
    finally:
        if checkpoint is not None:
            checkpoint.close()
    retie(model)
    tensors = (*model.named_parameters(), *model.named_buffers())
    empty = [f"{each} has nowhere to come from" for each, tensor in tensors if tensor.is_meta]
    raise_together(empty, f"{name} cannot be loaded", ctx)
    dtype = dtype or model.config.dtype
    if line := held.line(dtype, {name: _kept(model, name, source) for name, source in held.quantised.items()}):
        report = replace(report, widened=line)
        if ctx.cur_rank == 0:
            ctx.info(f"{name}: {line}")
    model.parallel_report = report
    return model.eval(), part


def _read(
    folder: Path, staging: Staging, dtype: torch.dtype | None, strict: bool, trust_remote_code: bool
) -> tuple[Any, Any, Contents, list[str]]:
    """Return the empty model, the open checkpoint, the sources of the model's tensors, and the problems."""
    model = checkpoint = None
    held = Contents({})
    try:
        check_contents(folder, trust_remote_code)
        raw = read_config(folder)
        checkpoint = Checkpoint(folder, staging, raw.get("transformers_weights"))
        scheme = scheme_of(folder, raw)
        model = empty_model(folder, raw, checkpoint, dtype, trust_remote_code)
        held = contents(scheme, checkpoint, strict)
        held.sources, problems = names.find(model, held.sources, strict)
        if held.problems:  # a weight that cannot be read is not missing
            problems = held.problems + [line for line in problems if names.MISSING not in line]
        _keep_groups(model, held.sources)
    except PlatformError:  # of what is installed, for all ranks alike
        raise
    except (OSError, ValueError) as error:  # CheckpointError is a ValueError
        problems = [one_line(error)]
    except Exception as error:  # from any configuration; the other ranks wait in `raise_together`
        problems = [f"the configuration makes no model: {type(error).__name__}: {one_line(error)}"]
    return model, checkpoint, held, problems


def _keep_groups(model: nn.Module, sources: dict[str, Source]) -> None:
    """Set the group size of each module whose weight has scales by group, so that its split ends between groups."""
    for name, source in sources.items():
        unit = max((each.format.unit for each in quantised_weights(source)), default=1)
        if unit > 1:
            keep_units(*_owner(model, name), unit)


def _refusal(path_or_id: Any, dtype: Any, own: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
    if not isinstance(path_or_id, (str, Path)):
        return f"path_or_id is a {type(path_or_id).__name__}: expected a str or a Path"
    if not str(path_or_id) or "\0" in str(path_or_id):
        return f"path_or_id is {str(path_or_id)!r}: expected a folder, or a name on the hub"
    if dtype not in (None, *DTYPES):
        return f"dtype is {dtype!r}: expected None, torch.bfloat16, torch.float16 or torch.float32"
    known = inspect.signature(Options).parameters
    for name, value in options.items():
        if name not in known:
            return f"{name} is {value!r}: expected no option but dtype, {', '.join((*own, *known))}"
    try:
        flags(**own)
        Options(**options).check()
    except ArgumentError as error:
        return str(error)
    return None


def _place(path_or_id: str | Path) -> str:
    """Return the absolute path of a folder, which does not depend on the working directory, or the name on the hub."""
    return os.path.abspath(path_or_id) if os.path.isdir(path_or_id) else str(path_or_id)


def _folder(path_or_id: str | Path, trust_remote_code: bool, ctx: Iris) -> Path:
    """Return the folder of the files, which rank 0 finds, or downloads."""
    place = error = None
    if ctx.cur_rank == 0 and os.path.lexists(path_or_id) and not os.path.isdir(path_or_id):
        error = f"{str(path_or_id)!r} is a file, not a folder"
    elif ctx.cur_rank == 0:
        place = _place(path_or_id)
        try:
            if not Path(place).is_dir():
                from huggingface_hub import snapshot_download

                code = ["*.py"] if trust_remote_code else []
                place = snapshot_download(place, allow_patterns=["*.json", "*.safetensors", *code])
        except Exception as caught:  # any error: the other ranks wait in `broadcast`
            error = f"{place!r} is not a folder, and {_hub_message(caught)}"
    place, error = ctx.broadcast((place, error))
    if error:
        raise CheckpointError(shown(error, 2000))
    return Path(place)


def _hub_message(error: Exception) -> str:
    """Return the message of an `error` of `snapshot_download`, with a remedy if the hub was not reached."""
    kinds = {kind.__name__ for kind in type(error).__mro__}  # of huggingface_hub, whose import may be what failed
    if "LocalEntryNotFoundError" in kinds:  # no connection, or HF_HUB_OFFLINE
        return (
            "the Hugging Face hub was not reached, nor is a model of that name in its cache; expected a connection, or "
            "a folder, such as iris_tp.smollm2.checkpoint(), which needs no hub (docs/start/model.md): "
            f"{one_line(error)}"
        )
    if "RepositoryNotFoundError" in kinds:
        return f"the Hugging Face hub has no model of that name that this account may read: {one_line(error)}"
    return f"it cannot be loaded from the Hugging Face hub: {one_line(error)}"


@contextmanager
def _in_turn(ctx: Iris, rank_0_first: bool) -> Iterator[None]:
    """Let rank 0 run the block before the others, if `rank_0_first`: it copies the model's code for transformers."""
    if rank_0_first and ctx.cur_rank:
        ctx.broadcast(None)
    try:
        yield
    finally:
        if rank_0_first and not ctx.cur_rank:
            ctx.broadcast(None)


def _load(model: nn.Module, name: str, source: Source, device: torch.device) -> None:
    module, key = _owner(model, name)
    if hasattr(module, "load_shard"):
        module.load_shard(key, source)
        return
    if (coded := coded_weight(module, key)) is not None:
        coded.fill(source)
        return
    local = torch.empty_like(getattr(module, key), device=device)
    if split_by := part_of(module, key):
        part, dim = split_by
        part.fill(local, source, dim)
    else:
        fill(local, source)
    setattr(module, key, nn.Parameter(local, requires_grad=False) if key in module._parameters else local)


def _tie(model: nn.Module, stored: dict[str, Source], device: torch.device) -> None:
    """Give each tied parameter that is not `stored` itself the tensor it is tied to, or this rank's shard of that.

    `retie` ties heads that are split by rows.
    """
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        (module, key), (other, of) = (_owner(model, name) for name in (target, source))
        if target in stored or (key == "weight" and getattr(module, "tied_to", None)):
            continue
        if hasattr(module, "load_shard") or hasattr(other, "load_shard"):
            _load(model, target, stored[source], device)
        else:
            setattr(module, key, getattr(other, of))


def _kept(model: nn.Module, name: str, source: Source) -> Kept:
    """Return what became of a quantised weight of the files."""
    module, key = _owner(model, name)
    if (coded := coded_weight(module, key)) is not None:
        return Kept(coded.form.name, coded.keeps(source))
    if reason := getattr(module, "reasons", {}).get(key, ""):
        return Kept(reason=reason)
    storage = getattr(module, "storage", None) if key == "weight" else None
    if not isinstance(storage, Quantised):
        return Kept(reason="not a split linear" if storage is None else storage.reason)
    return Kept(storage.form.name, storage.keeps(source))


def _owner(model: nn.Module, name: str) -> tuple[Any, str]:
    """Return the module that has the parameter or buffer `name`, and its name there."""
    parent, _, key = name.rpartition(".")
    return model.get_submodule(parent), key


def _compute_buffers(model: Any, device: torch.device) -> None:
    """Fill the buffers that are not stored, as the model's class initialises them. Keep what was loaded."""
    computed, parts = set(), []
    for name, buffer in list(model.named_non_persistent_buffers()):
        parent, _, key = name.rpartition(".")
        owner, size = model.get_submodule(parent), list(buffer.shape)
        if (held := part_of(owner, key)) is not None:  # the class computes the unsplit buffer
            parts.append((owner, key, *held))
            size[held[1]] = held[0].total
        setattr(owner, key, buffer.new_empty(size, device=device))
        while parent not in computed:  # a model may fill its layers' buffers
            computed.add(parent)
            parent = parent.rpartition(".")[0]
    for name, module in model.named_modules():
        module._is_hf_initialized = name not in computed
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    with torch.device("cpu"):  # whatever device the caller has made the default, which may hold no values
        type(model).initialize_weights(model)  # this instance's own refuses
    for owner, key, part, dim in parts:
        split_parameter(owner, key, part, dim)


def _progress(tensors: dict[str, Source], ctx: Iris) -> Iterator[tuple[str, Source]]:
    """Yield the tensors in the order of the files, with a progress bar on rank 0."""
    from tqdm import tqdm

    total = sum(stored.nbytes for stored in tensors.values())
    with tqdm(total=total, desc="loading", unit="B", unit_scale=True, disable=ctx.cur_rank != 0) as bar:
        for name, stored in sorted(tensors.items(), key=lambda item: item[1].place):
            yield name, stored
            bar.update(stored.nbytes)
