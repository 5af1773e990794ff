"""How is a launch made cheap?

`relaunch` repeats one, `graphs` turns several into one CUDA graph, `streams` runs parts of a call beside others.
"""
