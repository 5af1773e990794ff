"""A Hugging Face model, split in place by its own tensor-parallel plan; a tiny random Llama, so nothing is downloaded.

python -m examples.split_a_model
"""

import iris
from iris_tp import launch
import layers
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)  # the same weights on every rank
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
    )
    return LlamaForCausalLM(config).eval()


def rank_main(tokens: int = 8) -> None:
    with iris.iris(heap_size=1 << 26) as ctx:
        model = tiny_llama().to(ctx.device)
        prompt = torch.arange(1, 9, device=ctx.device)[None]
        expected = model.generate(prompt, max_new_tokens=tokens, do_sample=False)

        report = layers.parallelize(model, ctx)
        if ctx.cur_rank == 0:
            print(report)
        given = model.generate(prompt, max_new_tokens=tokens, do_sample=False)
        ctx.barrier()
        ctx.info(f"generated {given[0, 8:].tolist()}, as before the split: {torch.equal(given, expected)}")
        assert torch.equal(given, expected)


def main() -> None:
    launch.run(rank_main)


if __name__ == "__main__":
    main()
