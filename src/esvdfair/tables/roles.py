"""What the columns of a table are."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from esvdfair.tables.words import listing, not_there, short


@dataclass(frozen=True)
class Roles:
    """What the columns of a table are.

    Attributes
    ----------
    sensitive : the groups; several columns mean their combinations
    target : the label, if there is one
    predictions : predictions of a model that is not at hand; then no column is an input
    features : the model's inputs, in its order; None takes the remaining columns in file order
    """

    sensitive: tuple[str, ...]
    target: str | None = None
    predictions: str | None = None
    features: tuple[str, ...] | None = None

    def named(self) -> dict[str, str]:
        """Column -> what it is, of those that are no inputs."""
        single = {"target": self.target, "predictions": self.predictions}
        return dict.fromkeys(self.sensitive, "sensitive") | {c: role for role, c in single.items() if c is not None}

    def inputs(self, columns: Sequence[str]) -> list[str]:
        """Columns that the model takes."""
        if self.features is not None:
            return list(self.features)
        return [] if self.predictions is not None else [name for name in columns if name not in self.named()]


def check_roles(roles: Roles, columns: Sequence[str], path: Path) -> list[str]:
    """The model's inputs; every column that has a role is there and has one role only."""
    if not roles.sensitive:
        raise ValueError("no sensitive column was named; parity is between the groups that it makes.")
    for name in (*roles.named(), *(roles.features or ())):
        if name not in columns:
            raise ValueError(not_there(name, columns, path))
    others = {*roles.sensitive, *(roles.features or ())}
    for single, what in ((roles.target, "target"), (roles.predictions, "predictions")):
        if single is not None and single in others:
            raise ValueError(f"column {short(single)} is the {what} and something else besides; give it one role.")
        others.add(single or "")
    inputs = roles.inputs(columns)
    repeated = [name for name in dict.fromkeys(inputs) if inputs.count(name) > 1] if roles.features else []
    if repeated or len(set(roles.sensitive)) < len(roles.sensitive):
        raise ValueError(f"a column is named twice: {listing(repeated or roles.sensitive)}.")
    if not inputs and roles.predictions is None:
        raise ValueError(f"{str(path)!r} has no column left for the model's inputs beside {listing(roles.named())}.")
    return inputs
