"""Data sets to try the library on: one that is always there (wages) and the two of the paper (law, COMPAS)."""

from esvdfair.datasets.base import Dataset, Examples, Split, split
from esvdfair.datasets.paper import fetch_compas, fetch_law
from esvdfair.datasets.wages import load_wages, make_wages

__all__ = ["Dataset", "Examples", "Split", "fetch_compas", "fetch_law", "load_wages", "make_wages", "split"]
