"""Moments that travel: rows of a site -> group moments at the input of a model's last layer, and what these are of."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from esvdfair.batches import Batch, Data, make_batches
from esvdfair.core.checks import Label, to_numpy
from esvdfair.core.moments import GroupMoments
from esvdfair.core.moments_file import label_from_json
from esvdfair.core.quadratic import Head
from esvdfair.distributed import all_gather, broadcast, few_threads, reading, together
from esvdfair.exceptions import Given, InputError
from esvdfair.federated.guard import MIN_ROWS, Array, Frame, Guard, Noise, add_noise, make_noise
from esvdfair.files import version_of
from esvdfair.models import adapt, fingerprint
from esvdfair.models.base import LinearLayer
from esvdfair.sample import Setting, check_features, check_prediction, prepare

MomentsFile = str | os.PathLike[str]
T = TypeVar("T")

_NAMES = ("sensitive", "features", "control")


@dataclass(frozen=True)
class Site:
    """One collection of rows: what tells it from others, and how many rows of which group it had; under masks, neither.

    ``name`` is that of the file it came in; ``version`` that of the esvdfair that collected it; ``withheld`` the number
    of rows that are not in the moments, because they would have stood alone; ``noise`` what was added to them;
    ``apart`` the number of units in which every group is told of by itself, where it is not all (:mod:`.guard`).
    """

    fingerprint: str
    labels: tuple[Label, ...]
    rows: tuple[int, ...]
    version: str
    name: str | None = None
    withheld: int = 0
    noise: Noise | None = None
    apart: int | None = None


@dataclass(frozen=True)
class OutputFigures:
    """What moments tell exactly about predictions ``p = a·h + c`` of a layer's inputs h.

    Attributes
    ----------
    means, variances : (G,) of the predictions of every group; variances unbiased, NaN of a single row
    mean_gap, variance_gap : largest difference of either between two groups
    mse, r2 : against the labels, over all rows; None where there are none, or where the head is curved
    group_mse, group_r2 : (G,) the same within every group
    """

    means: Array
    variances: Array
    mse: float | None = None
    r2: float | None = None
    group_mse: Array | None = None
    group_r2: Array | None = None

    @property
    def mean_gap(self) -> float:
        return float(np.ptp(self.means))

    @property
    def variance_gap(self) -> float:
        return float(np.ptp(self.variances))


@dataclass(frozen=True)
class SiteMoments:
    """Group moments of one site, or of several that were merged; holds no row.

    Attributes
    ----------
    moments : of ``[h, y]`` in every group, h the inputs of the model's last linear layer; of h alone without labels
    group_parts : where gaps are to be adjusted, the moments are of cells of a group and a stratum, and so many parts of
        their labels name the group (:mod:`esvdfair.core.ks`); 0 says that they are of groups
    model : SHA-256 of the model (:func:`esvdfair.models.fingerprint`)
    layer, head : the last linear layer and what maps its output to the prediction, as they are in that model
    labelled : whether the last column is a label y
    sensitive, features, target, control : names of the columns; None where the data had no names
    inputs : number of columns that the model takes, where it takes one table
    sites : what the moments were merged from, one entry for each collection
    left_out : units (inputs of the layer) that few people had; of them the moments tell only their common part of the
        output, so that a repair can change their weights by one common factor
    """

    moments: GroupMoments
    model: str
    layer: LinearLayer
    head: Head
    labelled: bool
    sites: tuple[Site, ...]
    sensitive: tuple[str, ...] | None = None
    features: tuple[str, ...] | None = None
    target: str | None = None
    left_out: tuple[int, ...] = ()
    control: tuple[str, ...] | None = None
    group_parts: int = 0
    inputs: int | None = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one file: a zip of plain arrays with a header in JSON, no pickle; it appears whole or not at all."""
        self.check_noise()
        self.moments.save(path, about=self.about())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "SiteMoments":
        """Read what :meth:`save` wrote; ValueError for a file of another kind, or a damaged one."""
        if not os.path.isfile(path):
            raise FileNotFoundError(f"there is no file {os.fspath(path)!r}.")
        moments, about = GroupMoments.load_with_about(path)
        if about is None:
            raise ValueError(
                f"{os.fspath(path)!r} does not say which model and layer its moments are of, so they cannot be used "
                "safely. Collect them with `esvdfair moments collect` or esvdfair.federated.collect_moments."
            )
        try:
            site = cls.from_about(moments, about)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{os.fspath(path)!r} is a damaged moments file: {error}.") from error
        if not any(part.noise for part in site.sites):  # with noise no rows need have such moments
            moments.check_possible(path)
        return site

    def about(self) -> dict[str, Any]:
        """All but the moments, as JSON can hold it."""
        weight, bias = self.original
        layer = {"name": self.layer.name, "index": self.layer.index, "weight": weight.tolist()}
        return {
            "model": self.model,
            "layer": layer | {"bias": None if self.layer.bias is None else bias, "head": asdict(self.head)},
            "width": len(weight),
            "sites": [asdict(site) for site in self.sites],
            **{
                name: getattr(self, name)
                for name in ("labelled", "left_out", "group_parts", "inputs", *_NAMES, "target")
            },
        }

    @classmethod
    def from_about(cls, moments: GroupMoments, about: Mapping[str, Any]) -> "SiteMoments":
        """From moments and what :meth:`about` said of them; KeyError, TypeError or ValueError where that cannot be."""
        layer, labelled = about["layer"], bool(about["labelled"])
        weight = np.array([layer["weight"]], dtype=np.float64)
        left_out, parts = tuple(map(int, about["left_out"])), int(about.get("group_parts", 0))
        if weight.ndim != 2 or not np.isfinite(weight).all() or weight.shape[1] + labelled != moments.width:
            raise ValueError(f"its moments have {moments.width} columns, and its layer does not fit them")
        if left_out != tuple(sorted(set(left_out))) or not {*left_out} <= {*range(weight.shape[1])}:
            raise ValueError("the units that it leaves out are not units of its layer")
        if parts and not all(isinstance(cell, tuple) and 0 < parts < len(cell) for cell in moments.labels):
            raise ValueError("its groups are not those of strata")
        bias = _if_known(lambda bias: np.array([float(bias)]), layer["bias"])
        return cls(
            moments=moments,
            model=str(about["model"]),
            layer=LinearLayer(str(layer["name"]), int(layer["index"]), weight, bias),
            head=Head(**layer["head"]),
            labelled=labelled,
            sites=tuple(map(_site, about["sites"])),
            target=_if_known(str, about["target"]),
            left_out=left_out,
            group_parts=parts,
            inputs=_if_known(int, about.get("inputs")),
            **{name: _if_known(_texts, about.get(name)) for name in _NAMES},
        )

    def check_noise(self) -> None:
        """Raise if these moments have only a part of the noise that their epsilon needs."""
        noises = [site.noise for site in self.sites if site.noise is not None]
        if any(noise.sites > len(noises) for noise in noises):
            raise InputError(
                "these moments have one site's part of a noise that {sites} sites add together ({sharing}); only the "
                "sum may be seen. Mask them.",
                sites=max(noise.sites for noise in noises),
                sharing=Given(),
            )

    @cached_property
    def compared(self) -> GroupMoments:
        """Moments of the groups: the same, or of cells those of groups with the same mix of strata."""
        return self.moments.adjusted(self.group_parts) if self.group_parts else self.moments

    def named(self, name: str) -> "SiteMoments":
        """The same, collections that have no name being called so."""
        return replace(self, sites=tuple(replace(site, name=site.name or name) for site in self.sites))

    def without(self, units: tuple[int, ...]) -> "SiteMoments":
        """The same, all of these units and those that are left out already being told of in common only.

        Their inputs h become ``w_j (Σ w h) / Σ w²``, the sums over these units: all that the layer makes of them is
        ``Σ w h``, which stays as it is.
        """
        units = tuple(sorted({*units, *self.left_out}))
        if units == self.left_out:
            return self
        along = np.zeros(len(self.layer.weight[0]))
        along[list(units)] = self.layer.weight[0][list(units)]
        matrix = np.eye(self.moments.width)
        matrix[list(units), list(units)] = 0.0
        matrix[: len(along), : len(along)] += np.outer(along, along) / (along @ along or 1.0)
        return replace(self, moments=self.moments.mapped(matrix), left_out=units)

    @property
    def original(self) -> tuple[Array, float]:
        """Weight (p,) and bias of the layer; 0 where it has none."""
        return self.layer.weight[0], 0.0 if self.layer.bias is None else float(self.layer.bias[0])

    @property
    def rows(self) -> int:
        """Number of rows that the moments have seen."""
        return int(self.moments.rows.sum())

    def figures(self, weight: Array | None = None, bias: float | None = None) -> OutputFigures:
        """What the moments tell about the model's predictions, or about those with another last layer.

        Where the head is curved, means and variances are those before it, and errors are unknown. Without labels there
        is no error either; see :meth:`change`.
        """
        (a, c), moments = self._form(weight, bias), self.compared
        means = moments.means @ a + c
        with np.errstate(divide="ignore", invalid="ignore"):  # one row has no variance
            variances = np.einsum("gij,i,j->g", moments.scatters, a, a) / moments.divisors
        if not self.labelled or not self.head.is_affine:
            return OutputFigures(means, variances)
        mse, group_mse = self._squares(np.append(a[:-1], -1.0), c)
        spread = float(moments.pooled_scatter()[-1, -1]) / moments.pooled_weight
        r2 = 1 - mse / spread if spread > 0 else None
        with np.errstate(divide="ignore", invalid="ignore"):
            group_r2 = 1 - group_mse / (moments.scatters[:, -1, -1] / moments.counts)
        return OutputFigures(means, variances, mse, r2, group_mse, group_r2)

    def change(self, weight: Array, bias: float) -> tuple[float, Array] | None:
        """Mean squared change of the predictions when the last layer becomes another: overall, and (G,) by group.

        None where the head is curved.
        """
        if not self.head.is_affine:
            return None
        (a, c), (before, offset) = self._form(weight, bias), self._form(*self.original)
        return self._squares(a - before, c - offset)

    def _form(self, weight: Array | None, bias: float | None) -> tuple[Array, float]:
        """a (n,) and c of the predictions ``a·x + c`` of rows x = [h, y]; before the head where that is curved."""
        w, b = self.original if weight is None else (weight, bias or 0.0)
        slope, intercept = self.head.line if self.head.is_affine else (1.0, 0.0)
        return np.append(slope * w, np.zeros(int(self.labelled))), intercept + slope * b

    def _squares(self, a: Array, c: float) -> tuple[float, Array]:
        """``E(a·x + c)²`` over all rows, and (G,) in every group: ``aᵀ scatter_g a / Σw + (a·mean_g + c)²``."""
        moments = self.compared
        within = np.einsum("gij,i,j->g", moments.scatters, a, a) / moments.counts
        squares = np.maximum(within, 0.0) + (moments.means @ a + c) ** 2
        overall = max(float(a @ moments.pooled_scatter() @ a), 0.0) / moments.pooled_weight
        return overall + float(moments.pooled_mean() @ a + c) ** 2, squares


def _site(item: Mapping[str, Any]) -> Site:
    return Site(
        str(item["fingerprint"]),
        tuple(map(label_from_json, item["labels"])),
        tuple(map(int, item["rows"])),
        str(item["version"]),
        _if_known(str, item["name"]),
        int(item["withheld"]),
        _if_known(lambda noise: Noise(**noise), item["noise"]),
        _if_known(int, item.get("apart")),
    )


def _if_known(kind: Callable[[Any], T], value: Any) -> T | None:
    return None if value is None else kind(value)


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(map(str, values))


# --- collecting ----------------------------------------------------------------------------------------------------


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
        person more or less (:class:`.guard.Noise`); then no unit is left out and nobody withheld. ``public`` is
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
        if epsilon is not None and public is None:
            raise InputError(
                "{epsilon} needs {public}: without bounds from other rows one person could change the sums by "
                "anything.",
                epsilon=Given(epsilon),
                public=Given(),
            )
        setting = prepare(
            adapt(model, output=output),
            Data(X, y, sensitive_features, sample_weight, control_features),
            missing=missing,
            batch_size=batch_size,
            validation_fraction=0.0,
        )
        left_out: tuple[int, ...] = ()
        withheld, apart, noise, group_parts = 0, None, None, 0
        with few_threads(setting.width):
            if epsilon is None:
                guard = Guard(setting.last.weight[0], 0 if unsafe else min_rows)
                for rows, batch, weight in _rows(setting):
                    guard.update(rows, batch.labels, batch.codes, weight)
                    group_parts = batch.group_parts
                moments, left_out, withheld, apart = guard.finish()
                group_parts = max(all_gather(group_parts))  # a rank without rows does not know
            else:
                batches = make_batches(Data.of(public), missing=missing, batch_size=batch_size)
                moments, noise = _with_noise(setting, replace(setting, batches=batches), epsilon, delta, sharing)
    counts, version = tuple(moments.rows.tolist()), version_of("esvdfair") or "unknown"
    site = SiteMoments(
        moments=moments,
        model=fingerprint(setting.adapter.model),
        layer=setting.last,
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
    setting: Setting, public: Setting, epsilon: float, delta: float, sharing: int
) -> tuple[GroupMoments, Noise]:
    """Moments of the rows as public rows frame them, with noise."""
    labelled = setting.has_labels
    frame = Frame.of([rows for rows, *_ in _rows(public)], setting.last.weight[0], labelled=labelled)
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
            whole = h if batch.y is None else np.column_stack([h, batch.y])
            yield whole, batch, np.ones(rows) if batch.weight is None else batch.weight
            listen()


def _names(values: Any) -> tuple[str, ...] | None:
    """Names of the columns of a DataFrame or Series; None for data without names."""
    columns = getattr(values, "columns", None)
    if columns is not None:
        return _texts(columns)
    return _if_known(lambda name: (str(name),), getattr(values, "name", None))
