"""The documentation site: `make docs` builds it into docs/_build/html, and a warning is an error."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import esvdfair

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

project = "esvdfair"
author = "the authors of esvdfair"
copyright = author
version = release = esvdfair.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_gallery.gen_gallery",
    "reference",  # docs/_ext: the reference pages, from commands and public names
]
templates_path = ["_templates"]
# The last three are for who works on the code, and are read in the repository.
exclude_patterns = ["_build", "_ext", "examples", "architecture.md", "equations.md", "decisions"]
suppress_warnings = ["config.cache"]  # sphinx-gallery's settings hold a function

# MyST: anchors as GitHub makes them, so that a link works there and here.
myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 4

autosummary_generate = True
autodoc_typehints = "none"  # the docstrings say it in words
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

html_theme = "furo"
html_title = "esvdfair"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False

# COMPAS may not be redistributed; where its file is not there, the site has no page about it.
COMPAS = Path(os.environ.get("ESVDFAIR_DATA", "nowhere")) / "compas/compas-scores-two-years.csv"


def _readable(conf: Any, name: str) -> None:
    """Letters large enough to be read in a thumbnail."""
    import matplotlib as mpl

    mpl.rcParams["font.size"] = 13


sphinx_gallery_conf = {
    "examples_dirs": "examples",
    "gallery_dirs": "gallery",
    "ignore_pattern": "__init__" if COMPAS.is_file() else "plot_2_compas",
    "filename_pattern": re.escape("/examples/"),
    "abort_on_example_error": True,
    "capture_repr": (),  # what is printed, not what an expression is
    "download_all_examples": False,
    "remove_config_comments": True,
    "reset_modules": ("matplotlib", _readable),
    "thumbnail_size": (720, 400),
    "show_memory": False,
    "show_signature": False,
    "within_subsection_order": "FileNameSortKey",
    "write_computation_times": False,
}
