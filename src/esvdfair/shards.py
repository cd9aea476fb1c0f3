"""What ranks must agree on before they fit one model together, each on its shard of the rows."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from esvdfair.batches import Batch
from esvdfair.distributed import all_gather, broadcast, rank, world_size
from esvdfair.models.protocol import PROBE_ROWS, LinearLayer, row_slice


def number_rows(rows: int | None, name: str) -> tuple[int, int | None]:
    """Global number of this rank's first row, and how many rows all ranks have.

    Rows in memory are numbered rank after rank, as if the shards stood one below the other. ``rows`` is None for a
    stream, whose length nobody knows.

    Raises
    ------
    ValueError
        Some ranks pass rows in memory and others a stream: their numbers would collide.
    """
    counts = all_gather(rows)
    known = [count for count in counts if count is not None]
    if 0 < len(known) < len(counts):
        streams = [i for i, count in enumerate(counts) if count is None]
        raise ValueError(f"{name} is a stream on the ranks {streams} and arrays on the others; pass one kind on all.")
    return (0, None) if rows is None else (sum(known[: rank()]), sum(known))


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError, on every rank, when a rank was given other options than the first."""
    given = all_gather({name: repr(value) for name, value in options.items()})
    for i, other in enumerate(given):
        for name, value in given[0].items():
            if other[name] != value:
                raise ValueError(
                    f"{name} is {value} on rank 0 and {other[name]} on rank {i}; all ranks must be given the same."
                )


def check_model(layers: Sequence[LinearLayer]) -> None:
    """Raise ValueError, on every rank, when a rank holds another model than the first."""
    if world_size() == 1:
        return
    found = all_gather([(layer.name, layer.weight.shape, _digest(layer)) for layer in layers])
    for i, other in enumerate(found):
        if other != found[0]:
            names = [a[0] for a, b in zip(found[0], other, strict=False) if a != b]
            raise ValueError(
                f"rank {i} holds another model than rank 0 (layers {names or 'differ in number'}); load the same "
                "weights on all ranks."
            )


def gather_labelled(labelled: bool | None) -> list[bool | None]:
    """Of every rank whether its rows have labels; None for a rank without rows.

    Raises
    ------
    ValueError
        No rank has rows, or some have labels and others have none.
    """
    found = all_gather(labelled)
    with_y, without = ([i for i, known in enumerate(found) if known is wanted] for wanted in (True, False))
    if with_y and without:
        raise ValueError(f"the ranks {with_y} have labels and the ranks {without} have none; pass y on all or on none.")
    if not with_y and not without:
        raise ValueError("there are no rows to fit on: the data is empty.")
    return found


def share_probe(first: Batch | None) -> tuple[Any, bool]:
    """Rows on which to look at the model, and whether there are labels.

    A rank without rows gets some from the first rank that has them.

    Raises
    ------
    ValueError
        As :func:`gather_labelled`.
    """
    labelled = gather_labelled(None if first is None else first.y is not None)
    source = next(i for i, known in enumerate(labelled) if known is not None)
    probe = None if first is None else first.x
    if None in labelled:
        found = broadcast(lambda: _on_cpu(row_slice(probe, 0, PROBE_ROWS)), source)
        probe = found if first is None else probe
    return probe, bool(labelled[source])


def _digest(layer: LinearLayer) -> str:
    digest = hashlib.sha256(layer.weight.tobytes())
    digest.update(b"" if layer.bias is None else layer.bias.tobytes())
    return digest.hexdigest()


def _on_cpu(rows: Any) -> Any:
    return rows.detach().cpu() if hasattr(rows, "detach") else rows
