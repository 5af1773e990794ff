"""The command `iris-tp`: what a user asks from a shell, where the packages answer in Python."""
