"""At the sites: rows -> moments; and between them: moments of several sites -> one."""

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from esvdfair.batches import Batch, Data, make_batches
from esvdfair.core.checks import to_numpy
from esvdfair.core.moments import GroupMoments
from esvdfair.distributed import all_gather, broadcast, few_threads, reading, together
from esvdfair.exceptions import ESVDFairWarning, Given, InputError
from esvdfair.federated.guard import MIN_ROWS, Array, Guard
from esvdfair.federated.masks import MaskedMoments, is_masked, unmask
from esvdfair.federated.noise import Frame, Noise, add_noise, make_noise
from esvdfair.federated.sites import MomentsFile, Site, SiteMoments, loaded
from esvdfair.files import version_of
from esvdfair.models import adapt, fingerprint
from esvdfair.sample import Setting, check_features, check_prediction, prepare
from esvdfair.text import printable


def collect_moments(
    model: Any,
    X: Any,
    y: Any = None,
    *,
    sensitive_features: Any = None,
    sample_weight: Any = None,
    control_features: Any = None,
    output: Any = None,
    missing: str = "error",
    batch_size: int = 8192,
    min_rows: int = MIN_ROWS,
    unsafe: bool = False,
    epsilon: float | None = None,
    delta: float = 1e-6,
    public: tuple[Any, ...] | None = None,
    sharing: int = 1,
) -> SiteMoments:
    """Moments of ``[h, y]`` in every group, h the inputs of the model's last linear layer: one pass over the rows.

    Under ``torch.distributed`` every rank passes its own rows, and all get the moments of all of them.

    Parameters
    ----------
    model, X, y, sensitive_features, sample_weight, control_features, output, missing, batch_size
        As in :class:`esvdfair.ESVDFair` and its ``fit``. Without ``y`` the moments are of h alone, and a repair can
        aim at the model's own predictions only. One group is enough here; the others may be at other sites. With
        ``control_features`` the moments are those of every group in every stratum, and a repair adjusts for these.
    min_rows : int
        Fewest rows of a group, of a unit in which it is active, and for each active unit (:mod:`.guard`): units that
        fewer people have are left out, and rows that would stand alone are withheld.
    unsafe : bool
        Tell of all units and all rows: the moments then hold single people's rows, for whoever looks for them.
    epsilon, delta, public : optional
        Add noise, so that everything in the moments but the names of the groups is (epsilon, delta)-private for one
        person more or less (:mod:`.noise`); then no unit is left out and nobody withheld. ``public`` is
        (X, y, sensitive_features) of rows that need no protection; they bound the others.
    sharing : int
        Number of sites that add the noise together, each a part of it. Such moments must be masked for all of these
        sites (:func:`mask_moments`); they cannot be saved or merged as they are.

    Returns
    -------
    SiteMoments
        ``.save(path)`` writes the file that may be sent.

    Raises
    ------
    ValueError
        No rows, a group below ``min_rows``, or whatever ``ESVDFair.fit`` would refuse.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.neural_network import MLPRegressor
    >>> from esvdfair.federated import collect_moments, merge_moments, repair_from_moments
    >>> rng = np.random.default_rng(0)
    >>> a = rng.integers(0, 2, 400)
    >>> X = rng.normal(size=(400, 3)) + a[:, None]
    >>> y = X.sum(axis=1) + rng.normal(size=400)
    >>> model = MLPRegressor(hidden_layer_sizes=(8,), max_iter=2000, random_state=0).fit(X, y)
    >>> sites = [collect_moments(model, X[i::2], y[i::2], sensitive_features=a[i::2]) for i in (0, 1)]
    >>> fair = repair_from_moments(model, merge_moments(sites))
    >>> fair.summary_["mean_gap_before"] > 0.1, fair.summary_["mean_gap_after"] < 1e-9
    (True, True)
    """
    with together():
        setting = prepare(
            adapt(model, output=output),
            Data(X, y, sensitive_features, sample_weight, control_features),
            missing=missing,
            batch_size=batch_size,
            validation_fraction=0.0,
        )
        layer, group_parts, noise, apart = setting.last, 0, None, None
        with few_threads(setting.width):
            if epsilon is None:
                guard = Guard(layer.weight[0], 0 if unsafe else min_rows)
                for rows, batch, weight in _rows(setting):
                    guard.update(rows, batch.labels, batch.codes, weight)
                    group_parts = batch.group_parts
                moments, left_out, withheld, apart = guard.finish()
                group_parts = max(all_gather(group_parts))  # a rank without rows does not know
            else:
                moments, noise = _with_noise(setting, epsilon, delta, sharing, public, missing, batch_size)
                left_out, withheld = (), 0
    counts, version = tuple(moments.rows.tolist()), version_of("esvdfair") or "unknown"
    site = SiteMoments(
        moments=moments,
        model=fingerprint(setting.adapter.model),
        layer=layer,
        head=setting.head,
        labelled=setting.has_labels,
        sites=(Site(moments.digest(), moments.labels, counts, version, None, withheld, noise, apart),),
        sensitive=_names(sensitive_features),
        features=_names(setting.probe),
        target=(_names(y) or (None,))[0],
        control=_names(control_features),
        group_parts=group_parts,
        inputs=setting.probe.shape[1] if len(getattr(setting.probe, "shape", ())) == 2 else None,
    )
    return site.without(left_out)


def _with_noise(
    setting: Setting,
    epsilon: float,
    delta: float,
    sharing: int,
    public: tuple[Any, ...] | None,
    missing: str,
    batch_size: int,
) -> tuple[GroupMoments, Noise]:
    """Moments of the rows as public rows frame them, with noise."""
    if public is None:
        raise InputError(
            "{epsilon} needs {public}: without bounds from other rows one person could change the sums by anything.",
            epsilon=Given(epsilon),
            public=Given(),
        )
    shown = replace(setting, batches=make_batches(Data.of(public), missing=missing, batch_size=batch_size))
    labelled = setting.has_labels
    frame = Frame.of([rows for rows, *_ in _rows(shown)], setting.last.weight[0], labelled=labelled)
    noise = make_noise(epsilon, delta, axes=len(frame.axes), sites=sharing)
    moments = GroupMoments()
    for rows, batch, weight in _rows(setting):
        if (weight != 1).any() or batch.group_parts:
            raise InputError(
                "{epsilon} goes with neither {sample_weight}, since a person of large weight would need more noise, "
                "nor {control_features}, whose cells have too few people for it.",
                epsilon=Given(epsilon),
                sample_weight=Given(),
                control_features=Given(),
            )
        moments.update_codes(frame.seen(rows), batch.labels, batch.codes)
    moments.all_reduce()
    noisy = broadcast(lambda: add_noise(moments, noise, labelled=labelled, random=np.random.default_rng()))
    return frame.told(noisy), noise


def _rows(setting: Setting) -> Iterator[tuple[Array, Batch, Array]]:
    """Rows ``[h, y]``, or h alone without labels, of one batch after the other, with the batch and the weights."""
    layer = setting.last
    with reading() as listen:
        for batch in setting.batches:
            rows = len(batch.codes)
            inputs, prediction = setting.adapter.capture(batch.x, [layer.name])
            check_prediction(prediction, rows)
            check_features(layer, inputs[layer.name], rows)
            h = to_numpy(inputs[layer.name]).astype(np.float64)
            if (batch.y is None) == setting.has_labels:
                raise ValueError("some batches have labels and some have none; pass y for all rows or for none.")
            yield (
                h if batch.y is None else np.column_stack([h, batch.y]),
                batch,
                np.ones(rows) if batch.weight is None else batch.weight,
            )
            listen()


def merge_moments(parts: Sequence[SiteMoments | MaskedMoments | MomentsFile]) -> SiteMoments:
    """Add up the moments of several sites.

    Parameters
    ----------
    parts : sequence of SiteMoments, or of paths of files that hold them; or masked ones of all sites (:mod:`.masks`)

    Raises
    ------
    ValueError
        The parts are of different models, layers, label states or columns; the error says what differs and where. Or
        the same rows come twice, also inside a file that was merged before: they would count double.
    """
    if not parts:
        raise ValueError("got no moments to merge; give those of one site at least.")
    if any(map(is_masked, parts)):
        return _merge_masked(parts)
    plain = [part for part in parts if not isinstance(part, MaskedMoments)]  # all of them, as the type checker sees
    named = [(_name_of(part, place), loaded(part)) for place, part in enumerate(plain, start=1)]
    for _, part in named:
        part.check_noise()
    (first_name, first), *others = named
    for name, part in others:
        _check_alike(first_name, first, name, part)
    _check_apart(named)
    _note_lone_groups(named)
    left_out = tuple(sorted({unit for _, part in named for unit in part.left_out}))
    moments = GroupMoments()
    for _, part in named:
        moments.merge(part.without(left_out).moments)
    sites = tuple(
        replace(site, name=site.name or (None if isinstance(source, SiteMoments) else Path(source).name))
        for source, (_, part) in zip(plain, named, strict=True)
        for site in part.sites
    )
    known: dict[str, Any] = {
        name: next((found for _, part in named if (found := getattr(part, name)) is not None), None)
        for name in ("sensitive", "features", "target", "control")
    }
    return replace(first, moments=moments, left_out=left_out, sites=sites, **known)


def _merge_masked(parts: Sequence[Any]) -> SiteMoments:
    if not all(map(is_masked, parts)):
        raise ValueError("some of these moments are masked and some are not; all sites mask for each other, or none.")
    return unmask([part if isinstance(part, MaskedMoments) else MaskedMoments.load(part) for part in parts])


# --- checks --------------------------------------------------------------------------------------------------------


def _check_alike(name: str, one: SiteMoments, other_name: str, other: SiteMoments) -> None:
    facts = {
        "model (SHA-256)": (one.model, other.model),
        "layer": (one.layer.name, other.layer.name),
        "number of the layer's inputs": (one.layer.weight.shape[1], other.layer.weight.shape[1]),
        "head": (one.head.kind, other.head.kind),
        "strata": _both(one.group_parts, other.group_parts, "told apart", "not told apart"),
        "label": _both(one.labelled, other.labelled, "labelled", "no label"),
        "sensitive columns": _first_difference(one.sensitive, other.sensitive),
        "target column": (one.target, other.target),
        "features": _first_difference(one.features, other.features),
        "control columns": _first_difference(one.control, other.control),
    }
    differing = [
        f"{what}: {printable(str(theirs), 100)} in {other_name}, {printable(str(mine), 100)} in {name}"
        for what, (mine, theirs) in facts.items()
        if mine != theirs and None not in (mine, theirs)
    ]
    if differing:
        raise ValueError(
            f"{other_name} and {name} cannot be merged; they differ in the {'; the '.join(differing)}. All sites must "
            "run one model on the same columns, all with labels or all without."
        )


def _both(one: object, other: object, yes: str, no: str) -> tuple[str, str]:
    return yes if one else no, yes if other else no


def _first_difference(one: tuple[str, ...] | None, other: tuple[str, ...] | None) -> tuple[str | None, str | None]:
    """Where two lists of names first differ, in words; a pair of None when they agree or one is unknown."""
    if one is None or other is None:
        return None, None
    pairs = enumerate(zip_longest(one, other), start=1)
    place, names = next(((place, pair) for place, pair in pairs if pair[0] != pair[1]), (0, (None, None)))
    mine, theirs = (f"no column {place}" if name is None else f"{name[:60]!r} as column {place}" for name in names)
    return (mine, theirs) if place else (None, None)


def _check_apart(named: list[tuple[str, SiteMoments]]) -> None:
    holder: dict[str, str] = {}
    for name, part in named:
        for site in part.sites:
            if site.fingerprint in holder:
                raise ValueError(
                    f"{name} holds the same rows as {holder[site.fingerprint]}; merged, they would count twice. Give "
                    "each collection once, alone or inside a file that was merged before."
                )
            holder[site.fingerprint] = name


def _note_lone_groups(named: list[tuple[str, SiteMoments]]) -> None:
    groups = dict.fromkeys(label for _, part in named for label in part.moments.labels)
    lone = [
        f"{label!r} is not in {', '.join(absent)}"
        for label in groups
        if (absent := [name for name, part in named if label not in part.moments.labels])
    ]
    if lone:
        warnings.warn(
            f"some groups are not at every site: {'; '.join(lone)}. That is well if these people are not there; groups "
            "are matched by their values, so all sites must write them alike.",
            ESVDFairWarning,
            stacklevel=3,
        )


# --- names ---------------------------------------------------------------------------------------------------------


def _name_of(source: SiteMoments | MomentsFile, place: int) -> str:
    return f"part {place}" if isinstance(source, SiteMoments) else repr(os.fspath(source))


def _names(values: Any) -> tuple[str, ...] | None:
    """Names of the columns of a DataFrame or Series; None for data without names."""
    columns = getattr(values, "columns", None)
    if columns is not None:
        return tuple(map(str, columns))
    name = getattr(values, "name", None)
    return None if name is None else (str(name),)
