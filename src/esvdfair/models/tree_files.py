"""Tree ensembles from the libraries' own files: LightGBM text, XGBoost JSON and UBJSON, CatBoost cbm."""

import importlib
import os
from pathlib import Path
from typing import Any, Self

from esvdfair.models.trees import TreeAdapter

_LIBRARIES = {"txt": "lightgbm", "json": "xgboost", "ubj": "xgboost", "cbm": "catboost"}


def tree_format(source: str | bytes | bytearray | os.PathLike[Any]) -> str | None:
    """Format of a file or its bytes: "txt", "json", "ubj" or "cbm"; None where it holds no trees of these libraries."""
    if isinstance(source, bytes | bytearray):
        head = bytes(source[:64])
    elif Path(source).is_file():
        with Path(source).open("rb") as file:
            head = file.read(64)
    else:
        return None
    if head.startswith(b"tree\n"):
        return "txt"
    if head.startswith(b"CBM1"):
        return "cbm"
    if head.startswith(b"{") and b"learner" in head:
        return "json" if head.lstrip(b"{ \r\n\t").startswith(b'"') else "ubj"
    return None


class TreeFileAdapter(TreeAdapter):
    """A tree ensemble in a file or in bytes; of a repaired one, ``model`` is the bytes in the same format."""

    def __init__(self, source: str | bytes | bytearray | os.PathLike[Any], *, output: Any = None) -> None:
        self._format = tree_format(source)
        self._given: Any = bytes(source) if isinstance(source, bytearray) else source
        content = self._given if isinstance(self._given, bytes) else Path(self._given).read_bytes()
        super().__init__(_open_bytes(content), output=output)

    def __reduce__(self) -> Any:
        return TreeFileAdapter, (self.model,)

    @property
    def model(self) -> Any:
        """The path or bytes that were given; of a model with new leaf values the bytes."""
        return _dump(self._model, self._format) if self._given is None else self._given

    def _twin(self) -> Self:
        twin = super()._twin()
        twin._given, twin._format = None, self._format
        return twin


def _open_bytes(content: bytes) -> Any:
    form = tree_format(content) or ""
    name = _LIBRARIES[form]
    try:
        library = importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"a .{form} model needs {name}: pip install 'esvdfair[{name}]'.", name=name) from error
    if form == "txt":
        return library.Booster(model_str=content.decode())
    if form == "cbm":
        plain = library.CatBoost().load_model(blob=content)
        binary = str(plain.get_all_params().get("loss_function")).startswith(("Logloss", "CrossEntropy"))
        kind = library.CatBoostClassifier if binary else library.CatBoostRegressor
        return kind().load_model(blob=content)
    return library.Booster(model_file=bytearray(content))


def _dump(model: Any, form: str | None) -> bytes:
    if form == "txt":
        text: str = model.model_to_string(num_iteration=-1)
        return text.encode()
    return bytes(model._serialize_model() if form == "cbm" else model.save_raw(raw_format=form))
