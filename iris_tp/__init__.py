"""The command `iris-tp`: the packages' functions for use from a shell."""
