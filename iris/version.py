"""The version of the distribution: here and nowhere else, so that a checkout that nobody installed knows it, too.

`pyproject.toml` reads it from the source. It imports nothing, so that `iris-tp --version` can run this file where
`iris` cannot be imported.
"""

__version__ = "0.1.0"
