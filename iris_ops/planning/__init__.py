"""Which way serves a problem, and how long does it take? Numbers only: nothing here knows Triton or a kernel."""
