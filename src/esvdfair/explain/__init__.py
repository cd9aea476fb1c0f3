"""Where in the network the gap lives, which features it follows, and who is moved by a repair: numbers only."""

from esvdfair.explain.directions import Direction, Directions, explain_directions
from esvdfair.explain.layers import LayerGap, LayerScan, scan_layers
from esvdfair.explain.people import GroupChange, Mover, People, explain_people
from esvdfair.explain.trees import TreeGap, explain_trees

__all__ = [
    "Direction",
    "Directions",
    "GroupChange",
    "LayerGap",
    "LayerScan",
    "Mover",
    "People",
    "TreeGap",
    "explain_directions",
    "explain_people",
    "explain_trees",
    "scan_layers",
]
