"""The demo's model over several hosts, its layers divided between them or a replica on each; tensor parallel inside.

On each host R, 0 and 1, with two ranks a host:

torchrun --nnodes 2 --node-rank R --nproc-per-node 2 --master-addr HOST --master-port 29500 \\
    -m examples.several_hosts --mesh pp

Prints what each host holds, the text, and whether all ranks have the tokens of the unsplit model. With `--mesh dp` each
host answers by itself. docs/guides/several-hosts.md makes two hosts out of one machine to try it.
"""

import argparse
import os
import time

import iris
from iris_tp import demo, smollm2
import layers
import torch
import torch.distributed as dist
from torch.distributed import init_device_mesh
from transformers import AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mesh", choices=("pp", "dp"), default="pp", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=4, help="new tokens (default %(default)s)")
    parser.add_argument("--engine", action="store_true", help="generate by layers.Engine")
    args = parser.parse_args()
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = iris.platform.device(int(os.environ["LOCAL_RANK"]), local)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    os.environ.setdefault(iris.platform.ENV_REPLAY, "1")  # of the interpreter, several times as fast
    dist.init_process_group(iris.platform.backend())
    mesh = init_device_mesh(device.type, (world // local, local), mesh_dim_names=(args.mesh, "tp"))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with iris.iris(heap_size=1 << 28, group=mesh["tp"]) as ctx:
        first = ctx.cur_rank == 0
        prepared = smollm2.checkpoint() if first else None  # one rank of each host converts it
        folder = ctx.broadcast(prepared)
        task = demo.Task(folder, demo.arguments.PROMPT, args.tokens, dtype, time.time())
        model = layers.from_pretrained(folder, ctx, mesh=mesh, dtype=dtype)
        held = model.config.num_hidden_layers
        if first:
            demo.say(task.started, f"host {os.uname().nodename}: {held} layers on {local} of {world} ranks")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        inputs = task.inputs(tokenizer, device)
        if args.engine:
            engine = layers.Engine(model, ctx, max_length=inputs["input_ids"].shape[1] + args.tokens)
            new = engine.generate(inputs["input_ids"], args.tokens)[0]
        else:
            output = model.generate(**inputs, max_new_tokens=args.tokens, do_sample=False)
            new = output[0, inputs["input_ids"].shape[1] :].tolist()
        everyone: list = [None] * world
        dist.all_gather_object(everyone, new)
    if dist.get_rank() == 0:
        print(tokenizer.decode(new))
        expected = demo.reference(task).tokens
        print(f"digests of the tokens: unsplit {demo.digest(expected)}, ranks {set(map(demo.digest, everyone))}")
        print(f"match: {'yes' if all(tokens == expected for tokens in everyone) else 'no'}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
