"""Generate text with a split model: an engine with a static cache, decode steps and prompts as CUDA graphs."""
