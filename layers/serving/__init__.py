"""How does a split model generate? An engine with a static cache, decode steps and prompts as CUDA graphs."""
