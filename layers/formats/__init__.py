"""Read published weights that are stored in fewer bits.

A format (`fp8`, `mxfp4`, `nvfp4`, `packed`, `awq`, `gptq`) is an object that knows one layout: which slices of the
stored tensors a part of the weight needs, and how these widen. A scheme (`transformers_schemes`, `compressed_tensors`,
`modelopt`) reads a configuration and says which tensors of the checkpoint form a weight of which format. `registry`
lists the schemes by the name in the configuration. Adding a format touches its own file and the schemes that use it.

Reading order: `weight_format`, `fp8`, `scheme`, `registry`.
"""
