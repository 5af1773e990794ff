"""Small programs that show the library; run one as `python -m examples.<name>`, with torchrun or alone."""
