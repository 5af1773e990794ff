"""Make a launch cheap: `relaunch` repeats one, `graphs` turns several into one CUDA graph, `streams` overlaps parts of
a call.
"""
