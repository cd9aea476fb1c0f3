"""Values that an adversary or a careless user passes for a column, a table or groups, with what they mean.

Each is a name, a function of the clean array, and its meaning: a function that gives the clean array that a reader
would take it for, or None when it means nothing and must be refused.
"""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy import sparse

Array = np.ndarray[Any, Any]


class Hostile(NamedTuple):
    """A hostile form of an array; ``meaning`` is None where there is none."""

    name: str
    make: Callable[[Array], Any]
    meaning: Callable[[Array], Array] | None


class Subclassed(np.ndarray):
    """An ndarray of another class."""


class Liar:
    """Says that it is an array and raises when asked."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        raise RuntimeError("no array today")

    def __len__(self) -> int:
        return 48


def _same(x: Array) -> Array:
    return x


def _but(value: Any, dtype: Any = object) -> Callable[[Array], Array]:
    """The array with its third entry replaced."""

    def make(x: Array) -> Array:
        changed = x.astype(dtype)
        changed.reshape(-1)[2] = value
        return changed

    return make


def _strided(x: Array) -> Array:
    wide = np.repeat(x, 2, axis=0)
    return wide[::2]


def _frozen(x: Array) -> Array:
    copy = x.copy()
    copy.flags.writeable = False
    return copy


def _masked(x: Array) -> Any:
    mask = np.zeros(x.shape, dtype=bool)
    mask.reshape(-1)[:5] = True
    return np.ma.masked_array(x, mask)


def _objects(x: Array, kind: Callable[[Any], Any]) -> Array:
    made = np.empty(x.size, dtype=object)
    made[:] = [kind(v) for v in x.reshape(-1).tolist()]
    return made.reshape(x.shape)


# --- of any array ----------------------------------------------------------------------------------------------------

SHAPES = [
    Hostile("empty", lambda x: x[:0], None),
    Hostile("one row", lambda x: x[:1], None),
    Hostile("a row short", lambda x: x[:-1], None),
    Hostile("a row more", lambda x: np.concatenate([x, x[:1]]), None),
    Hostile("0-d", lambda x: np.array(x.reshape(-1)[0]), None),
    Hostile("a scalar", lambda x: x.reshape(-1)[0], None),
    Hostile("three axes", lambda x: np.broadcast_to(x[..., None, None], (*x.shape, 2, 2)), None),
    Hostile("an empty list", lambda x: [], None),
    Hostile("a dict", lambda x: {"a": 1}, None),
    Hostile("a set", lambda x: {1, 2}, None),
    Hostile("a lone object", lambda x: object(), None),
    Hostile("no array today", lambda x: Liar(), None),
    Hostile("a structured dtype", lambda x: np.zeros(len(x), dtype=[("a", float), ("b", int)]), None),
    Hostile("read-only", _frozen, _same),
    Hostile("every second of twice as many", _strided, _same),
    Hostile("reversed twice", lambda x: x[::-1].copy()[::-1], _same),
    Hostile("subclassed", lambda x: x.view(Subclassed), _same),
    Hostile("masked, nothing under it", lambda x: np.ma.masked_array(x), _same),
    Hostile("masked", _masked, None),
    Hostile("masked everywhere", lambda x: np.ma.masked_all_like(x), None),
    Hostile("objects", lambda x: x.astype(object), _same),
    Hostile("None among them", _but(None), None),
    Hostile("pd.NA among them", _but(pd.NA), None),
    Hostile("NaT among them", _but(pd.NaT), None),
    Hostile("a list", lambda x: x.tolist(), _same),
    Hostile("a tuple", lambda x: tuple(x.tolist()) if x.ndim == 1 else tuple(map(tuple, x.tolist())), _same),
    Hostile("ragged lists", lambda x: [[1.0], [1.0, 2.0], *([[3.0]] * (len(x) - 2))], None),
    Hostile("dicts for entries", lambda x: _objects(x, lambda v: {"v": v}), None),
]  # fmt: skip

# --- of numbers ------------------------------------------------------------------------------------------------------

NUMBERS = [
    *SHAPES,
    Hostile("Fortran order", np.asfortranarray, _same),
    Hostile("big-endian", lambda x: x.astype(">f8"), _same),
    Hostile("float16", lambda x: x.astype(np.float16), lambda x: x.astype(np.float16).astype(float)),
    Hostile("float32", lambda x: x.astype(np.float32), lambda x: x.astype(np.float32).astype(float)),
    Hostile("long double", lambda x: x.astype(np.longdouble), _same),
    Hostile("int8", lambda x: np.rint(x * 9).astype(np.int8), lambda x: np.rint(x * 9)),
    Hostile("int64", lambda x: np.rint(x * 9).astype(np.int64), lambda x: np.rint(x * 9)),
    Hostile("bool", lambda x: x > np.median(x), lambda x: (x > np.median(x)).astype(float)),
    Hostile("Decimals", lambda x: _objects(x, Decimal), _same),
    Hostile("Fractions", lambda x: _objects(x, Fraction), _same),
    Hostile("complex", lambda x: x + 0j, None),
    Hostile("complex objects", _but(1j), None),
    Hostile("datetime64", lambda x: (x * 1e9).astype("datetime64[s]"), None),
    Hostile("timedelta64", lambda x: (x * 1e9).astype("timedelta64[s]"), None),
    Hostile("text", lambda x: x.astype(str), None),
    Hostile("words", lambda x: np.full(x.shape, "tall"), None),
    Hostile("bytes", lambda x: x.astype("S"), None),
    Hostile("text among numbers", _but("4"), None),
    Hostile("a list among numbers", lambda x: _objects(x, lambda v: [v, v]), None),
    Hostile("NaN", _but(np.nan, float), None),
    Hostile("infinite", _but(np.inf, float), None),
    Hostile("minus infinity", _but(-np.inf, float), None),
    Hostile("an integer beyond float", _but(10**400), None),
    Hostile("a long double beyond float", _but(np.longdouble("1e400"), np.longdouble), None),
    Hostile("torch", torch.from_numpy, _same),
    Hostile("torch with a gradient", lambda x: torch.from_numpy(x).requires_grad_(), _same),
    Hostile(
        "torch bfloat16",
        lambda x: torch.from_numpy(x).bfloat16(),
        lambda x: torch.from_numpy(x).bfloat16().double().numpy(),
    ),
    Hostile("torch complex", lambda x: torch.from_numpy(x).to(torch.complex64), None),
    Hostile("torch without data", lambda x: torch.from_numpy(x).to("meta"), None),
]  # fmt: skip

COLUMNS = [
    *NUMBERS,
    Hostile("one column", lambda x: x[:, None], _same),
    Hostile("two columns", lambda x: np.stack([x, x], 1), None),
    Hostile("a row", lambda x: x[None], None),
    Hostile("np.matrix", lambda x: np.asmatrix(x).T, _same),
    Hostile("a Series, shuffled index", lambda x: pd.Series(x, index=np.arange(len(x))[::-1]), _same),
    Hostile("a nullable Series", lambda x: pd.Series(x, dtype="Float64"), _same),
    Hostile("a nullable Series with NA", lambda x: pd.Series([None, *x[1:]], dtype="Float64"), None),
    Hostile("an Arrow Series", lambda x: pd.Series(x, dtype="double[pyarrow]"), _same),
    Hostile("a frame", lambda x: pd.DataFrame({"v": x}), _same),
    Hostile(
        "a frame, one name twice", lambda x: pd.DataFrame(np.stack([x, x], 1), columns=["v", "v"]), None
    ),
    Hostile("a Series of dates", lambda x: pd.Series(pd.date_range("2020", periods=len(x))), None),
    Hostile("a sparse column", lambda x: sparse.csr_array(x[:, None]), None),
    Hostile("one integer beyond int64", _but(2**70), lambda x: _but(2.0**70, float)(x)),
]  # fmt: skip

SCALES = [
    Hostile(f"times {scale:g}", lambda x, s=scale: x * s, lambda x, s=scale: x * s)
    for scale in (1e-300, 1e-200, 1e-160, 1e-100, 1e100, 1e160, 1e200, 1e300)
]
EXTREMES = [
    *SCALES,
    Hostile("constant", lambda x: np.full_like(x, 3.0), lambda x: np.full_like(x, 3.0)),
    Hostile("zero", np.zeros_like, np.zeros_like),
    Hostile("denormal", lambda x: np.sign(x) * 5e-324, lambda x: np.sign(x) * 5e-324),
    Hostile("largest, both signs", lambda x: np.sign(x) * 1.7e308, lambda x: np.sign(x) * 1.7e308),
    Hostile("one huge", _but(1e300, float), _but(1e300, float)),
    Hostile("shifted by 1e15", lambda x: x + 1e15, lambda x: x + 1e15),
]

WEIGHTS = [
    *COLUMNS,
    *(Hostile(f"times {s:g}", lambda x, s=s: x * s, _same) for s in (1e-300, 1e-160, 1e160, 1e300)),
    Hostile("negative", _but(-1.0, float), None),
    Hostile("zero", np.zeros_like, None),
    Hostile("minus zero", _but(-0.0, float), _but(0.0, float)),
    Hostile("zero for a group", lambda x: np.where(np.arange(len(x)) % 2, x, 0.0), None),
    Hostile("denormal", lambda x: np.full_like(x, 5e-324), np.ones_like),
    Hostile("largest", lambda x: np.full_like(x, 1.7e308), np.ones_like),
]

# --- of groups: the clean array holds "a" and "b", rows of even number "a" -------------------------------------------


def _codes(x: Array) -> Array:
    return (x == "b").astype(int)


def _relabelled(first: Any, second: Any) -> Callable[[Array], list[Any]]:
    return lambda x: [second if v == "b" else first for v in x]


def _pairs(x: Array) -> list[tuple[str, int]]:
    return [(v, i // 2 % 2) for i, v in enumerate(x)]


def _pair_names(x: Array) -> Array:
    return np.array([f"{v}{n}" for v, n in _pairs(x)])


GROUPS = [
    *SHAPES,
    Hostile("objects of str", lambda x: x.astype(object), _same),
    Hostile("bytes", lambda x: x.astype("S"), _same),
    Hostile("bool", lambda x: x == "b", _same),
    Hostile("int8", lambda x: _codes(x).astype(np.int8), _same),
    Hostile("uint64, the largest", lambda x: np.where(x == "b", np.uint64(2**64 - 1), np.uint64(3)), _same),
    Hostile("whole floats", lambda x: _codes(x).astype(float), _same),
    Hostile("float16", lambda x: _codes(x).astype(np.float16), _same),
    Hostile("big-endian integers", lambda x: _codes(x).astype(">i4"), _same),
    Hostile("torch integers", lambda x: torch.from_numpy(_codes(x)), _same),
    Hostile("integers beyond int64", _relabelled(10**30, 10**31), _same),
    Hostile("a Series, shuffled index", lambda x: pd.Series(x, index=np.arange(len(x))[::-1]), _same),
    Hostile("a Categorical, unused category", lambda x: pd.Categorical(x, ["c", "b", "a"]), _same),
    Hostile("a Categorical with NaN", lambda x: pd.Categorical([None, *x[1:]]), None),
    Hostile("a string Series", lambda x: pd.Series(x, dtype="string"), _same),
    Hostile("a string Series with NA", lambda x: pd.Series([None, *x[1:]], dtype="string"), None),
    Hostile("an Arrow Series", lambda x: pd.Series(x, dtype="string[pyarrow]"), _same),
    Hostile("a frame of one", lambda x: pd.DataFrame({"g": x}), _same),
    Hostile("a frame, one name twice", lambda x: pd.DataFrame(_pairs(x), columns=["g", "g"]), _pair_names),
    Hostile("tuples", _pairs, _pair_names),
    Hostile("lists of lists", lambda x: [list(p) for p in _pairs(x)], _pair_names),
    Hostile("lists of one", lambda x: [[v] for v in x], _same),
    Hostile("two columns of text", lambda x: np.array([[v, str(n)] for v, n in _pairs(x)]), _pair_names),
    Hostile("tuples with None", lambda x: [(None, 1), *_pairs(x)[1:]], None),
    Hostile("NaN in a list", lambda x: [np.nan, *x[1:].tolist()], None),
    Hostile("NaN made text by NumPy", lambda x: np.array([np.nan, *x[1:].tolist()]), None),
    Hostile("NaN among numbers", lambda x: np.where(np.arange(len(x)) == 2, np.nan, _codes(x)), None),
    Hostile("fractions", lambda x: _codes(x) + 0.5, None),
    Hostile("a measurement", lambda x: np.linspace(0, 1, len(x)), None),
    Hostile("infinite", lambda x: np.where(x == "b", np.inf, 1.0), None),
    Hostile("complex", lambda x: _codes(x) + 0j, None),
    Hostile("one group", lambda x: np.full(len(x), "a"), None),
    Hostile("1 and '1'", _relabelled(1, "1"), None),
    Hostile("True and 1", _relabelled(True, 1), None),
    Hostile("('a, b', 'c') and ('a', 'b, c')", _relabelled(("a", "b, c"), ("a, b", "c")), _same),
    Hostile("sets", _relabelled({1}, {2}), None),
    Hostile("arrays", _relabelled(np.arange(2), np.arange(3)), None),
    Hostile("dates", lambda x: np.where(x == "b", np.datetime64("2021-01-01"), np.datetime64("2020-01-01")), _same),
    Hostile("NaT among dates", lambda x: np.array(["NaT", *["2020", "2021"] * 24][: len(x)], "datetime64[D]"), None),
    Hostile("very long", _relabelled("a" * 100_000, "b" * 100_000), _same),
    Hostile("control characters", _relabelled("a\x00\n\u202e", "b\x1b[2J"), _same),
    Hostile("braces", _relabelled("{0!r:{x}}", "{a}"), _same),
    Hostile("lone surrogates", _relabelled("\ud800", "\udfff"), _same),
    Hostile("empty text", _relabelled("", "b"), _same),
    Hostile("a lone string", lambda x: "ab" * 24, None),
    Hostile("a structured row", lambda x: np.array([(v,) for v in x], dtype=[("g", "U1")]), None),
]  # fmt: skip

# --- of tables of features -------------------------------------------------------------------------------------------

TABLES = [
    *NUMBERS,
    Hostile("one axis", lambda x: x[:, 0], None),
    Hostile("a column short", lambda x: x[:, :-1], None),
    Hostile("a column more", lambda x: np.column_stack([x, x[:, 0]]), None),
    Hostile("no columns", lambda x: x[:, :0], None),
    Hostile("columns backwards twice", lambda x: x[:, ::-1].copy()[:, ::-1], _same),
    Hostile("np.matrix", np.asmatrix, _same),
    Hostile("a frame", pd.DataFrame, _same),
    Hostile("a frame, one name twice", lambda x: pd.DataFrame(x, columns=["v"] * x.shape[1]), _same),
    Hostile("a frame with words", lambda x: pd.DataFrame(x).assign(**{"3": "word"}), None),
    Hostile("a frame with NA", lambda x: pd.DataFrame(x).astype("Float64").mask(x > 2), None),
    Hostile("a nullable frame", lambda x: pd.DataFrame(x).astype("Float64"), _same),
    Hostile("a frame of dates", lambda x: pd.DataFrame(x).assign(d=pd.Timestamp("2020")), None),
    Hostile(
        "columns of several levels",
        lambda x: pd.DataFrame(x, columns=pd.MultiIndex.from_product([["a"], [*"bcde"[: x.shape[1]]]])),
        _same,
    ),
    Hostile("a frame, categories", lambda x: pd.DataFrame(x).astype("category"), _same),
]  # fmt: skip
SPARSE = [
    Hostile(kind, lambda x, kind=kind: sparse.csr_array(x).asformat(kind), _same)
    for kind in ("csr", "csc", "coo", "bsr", "lil")
]
