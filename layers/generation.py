"""`generate()` on split models: every rank must draw the same token, or the ranks' caches part ways.

Greedy search needs nothing: logits are gathered, so every rank has the same bits. Sampling draws from each process's
own random generator. So the model instance's `generate` first takes over rank 0's generator state; after that the ranks
run the same operations on the same bits, and stay together to the end of the call. One broadcast a call, none a token.
For users: the seed on rank 0 counts. The class is left as it is; only the instance's `generate` is wrapped.

What cannot be kept together is refused: `max_time` stops each rank by its own clock, and one that stops alone leaves
the others waiting. Compilation, which Hugging Face switches on for static caches on GPUs, is switched off in the
instance's generation config: whoever wants it says torch.compile.
"""

from __future__ import annotations

from types import MethodType

from iris.errors import ArgumentError
import torch

from .sharded import check_context


def share_rng(ctx) -> None:
    """Collective: gives every rank rank 0's state of the random generator that sampling on `ctx.device` uses."""
    check_context(ctx)
    device = torch.device(ctx.device)
    if device.type == "cuda":
        torch.cuda.set_rng_state(ctx.broadcast(torch.cuda.get_rng_state(device)).cpu(), device)
    else:
        torch.set_rng_state(ctx.broadcast(torch.get_rng_state()).cpu())


def agree_on_samples(model, ctx) -> None:
    """Makes `model.generate` of this instance draw the same tokens on every rank."""
    if not hasattr(model, "generate"):
        return
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.disable_compile = True

    def generate(self, *args, **kwargs):
        given = args[1] if len(args) > 1 else kwargs.get("generation_config")
        settings = given, self.generation_config, *(kwargs.get("stopping_criteria") or ())
        for max_time in (kwargs.get("max_time"), *(getattr(each, "max_time", None) for each in settings)):
            if max_time is not None:
                raise ArgumentError(f"max_time is {max_time}: expected None, ranks' clocks differ; set max_new_tokens")
        share_rng(ctx)
        return type(self).generate(self, *args, **kwargs)

    model.generate = MethodType(generate, model)
