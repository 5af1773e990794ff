"""The long description of the package: README.md, whose links have to lead somewhere outside the repository, too.

All else is in pyproject.toml. Links in README.md go to files beside it, which only a checkout has; here they become
absolute, by the repository's address in [project.urls].
"""

from pathlib import Path
import re

from setuptools import setup

ROOT = Path(__file__).parent
IMAGES = (".svg", ".png")


def long_description() -> str:
    repository = re.search(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]

    def absolute(link: re.Match) -> str:
        kind = "raw" if link[1].endswith(IMAGES) else "blob"
        return f"]({repository}/{kind}/main/{link[1]})"

    return re.sub(r"\]\((?![a-z]+:|#)([^)\s]+)\)", absolute, (ROOT / "README.md").read_text())


setup(long_description=long_description(), long_description_content_type="text/markdown")
