"""Prints a pip constraint for every bound of pyproject.toml: the lowest version that the package says it works with.

As in `python .ci/lowest.py --except torch > lowest.txt`.
"""

import re
import sys
import tomllib
from pathlib import Path

EXTRAS = ("torch", "onnx", "plots", "data")  # what users install; developers' tools may be new


def main() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    for requirement in wanted:
        found = re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement)
        if found is None:
            sys.exit(f"{requirement!r} has no lowest version; write name>=version in pyproject.toml.")
        if found[1] not in sys.argv[2::2]:
            print(f"{found[1]}=={found[2]}")


if __name__ == "__main__":
    main()
