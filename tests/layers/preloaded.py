"""What ranks of the tests of layers need beside `tests.preloaded`."""

import gc

import transformers.models.llama.modeling_llama  # noqa: F401

gc.freeze()
