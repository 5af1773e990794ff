"""Short programs as users of ROCm/iris write them, which run here unchanged but for the device (`DEVICE`)."""
