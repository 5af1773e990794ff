"""Plug-in for vLLM: its tensor-parallel layers run this library's kernels, and its users change nothing.

vLLM loads `plugin.register` by its entry point `vllm.general_plugins` in every process. What happens then:

    plugin.py   registers layers in place of vLLM's; the first one that is constructed installs the rest
    install.py  checks whether the configuration is supported, makes the context on vLLM's tensor-parallel group
    prepare.py  reserves memory for layers, and compiles their kernels while the model loads
    limits.py   the rows up to which layers are replaced, and the memory for them
    rewrite.py  replaces products, all-reduces and norms in the graphs that vLLM compiles
    ops.py      the operators in those graphs
    experts.py  the same for mixtures of experts, and which of vLLM's are replaced
    watch.py    ends the engine when a peer is lost, since no Python of ours runs while a CUDA graph replays

Only `plugin.py`, `install.py` and `experts.py` import vLLM.
"""
