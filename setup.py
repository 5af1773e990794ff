"""The long description of the package: README.md without its links to files, which only a checkout has.

All else is in pyproject.toml.
"""

from pathlib import Path
import re

from setuptools import setup

FILE = r"\((?![a-z]+:)[^)\s]+\)"  # of a link: neither an address nor empty


def long_description(readme: str) -> str:
    """Return `readme` with links to files and anchors as plain text, and without pictures that are files."""
    without_pictures = re.sub(rf"!\[[^\]]*\]{FILE}\n*", "", readme)
    return re.sub(rf"\[([^\]]*)\]{FILE}", r"\1", without_pictures)


if __name__ == "__main__":  # a build runs this file as a script; a test imports it
    README = (Path(__file__).parent / "README.md").read_text()
    setup(long_description=long_description(README), long_description_content_type="text/markdown")
