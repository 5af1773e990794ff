"""Import what ranks of the tests of layers need in addition to `tests.preloaded`."""

import gc

import transformers.models.llama.modeling_llama  # noqa: F401

gc.freeze()
