"""Data parallel across hosts, tensor parallel inside each: a DeviceMesh with dimensions "dp" and "tp".

python -m examples.device_mesh                                   # this machine's ranks as two groups
torchrun --nnodes 2 --node-rank R --nproc-per-node 4 --master-addr HOST --master-port 29500 -m examples.device_mesh

The second is started on each host R, 0 and 1. A context is made on the mesh's "tp" dimension: its ranks share one
model, and their fused ops stay inside the host. Each group answers its own part of the prompts.
"""

import os

import iris
from iris_tp import launch
import layers
import torch
import torch.distributed as dist
from torch.distributed import init_device_mesh

from examples.split_a_model import tiny_llama


def make_mesh(device: torch.device) -> dist.DeviceMesh:
    """Return a mesh [hosts, ranks of a host]; on a single host two groups, if the ranks can be halved."""
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if world == local and world % 2 == 0:
        local //= 2
    return init_device_mesh(device.type, (world // local, local), mesh_dim_names=("dp", "tp"))


def rank_main(tokens: int = 4) -> None:
    device = iris.platform.device(int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(iris.platform.backend())
    mesh = make_mesh(device)
    groups, group = mesh["dp"].size(), mesh["dp"].get_local_rank()
    with iris.iris(heap_size=1 << 26, group=mesh["tp"]) as ctx:
        model = tiny_llama().to(device)
        prompts = torch.arange(1, 1 + 4 * groups * 6, device=device).view(4 * groups, 6)
        expected = model.generate(prompts, max_new_tokens=tokens, do_sample=False)

        layers.parallelize(model, ctx)
        mine = model.generate(prompts.chunk(groups)[group], max_new_tokens=tokens, do_sample=False)
        answers = [None] * groups
        dist.all_gather_object(answers, mine.cpu(), mesh["dp"].get_group())
        assert torch.equal(torch.cat(answers), expected.cpu())
        ctx.info(
            f"group {group} of {groups} answered {len(mine)} of {len(expected)} prompts, as the unsplit model does"
        )


def main() -> None:
    ranks = launch.default_ranks(on_cpu=4)
    launch.run(rank_main, ranks - ranks % 2 or 1)


if __name__ == "__main__":
    main()
