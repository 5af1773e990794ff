"""Write a small checkpoint in a second: a Llama with random weights, a tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path

import torch

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ON_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The checkpoint that README and pages name, in whose place a test puts its own."""
MARKS = ("<|im_start|>", "<|im_end|>")


def save(folder: Path, chat: bool = True, positions: int = 256) -> Path:
    """Write the checkpoint into `folder`. Every byte is a token, so any text has one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = Tokenizer(models.BPE({each: number for number, each in enumerate(letters)}, []))
    whole.pre_tokenizer, whole.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole, additional_special_tokens=list(MARKS))
    if chat:
        tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=positions, initializer_range=0.3, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    return folder


def answer(folder: Path, message: str, tokens: int, chat: bool = True) -> str:
    """Return the text that the unsplit model generates on the CPU in float32, greedily."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = message
    if chat:
        messages = [{"role": "user", "content": message}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, return_tensors="pt")["input_ids"]
    new = model.generate(prompt, max_new_tokens=tokens, do_sample=False)[0, prompt.shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True)
