"""A `NeuralNetRegressor` of skorch, also in a Pipeline or a search, as a `ModelAdapter`: what goes in comes out."""

import copy
from typing import Any

import torch
from sklearn.compose import TransformedTargetRegressor
from sklearn.exceptions import NotFittedError

from esvdfair.models.base import Weights
from esvdfair.models.sklearn import before_last, levels
from esvdfair.models.torch import TorchAdapter
from esvdfair.models.torch_values import Inputs, Selector


class SkorchAdapter(TorchAdapter):
    """The network inside, seen through the steps before it.

    Parameters
    ----------
    model : skorch.NeuralNetRegressor
        Or a Pipeline, FrozenEstimator or GridSearchCV that ends in one. Fitted; `NotFittedError` otherwise.
    output : as of :class:`TorchAdapter`
    """

    def __init__(self, model: Any, *, output: Selector | None = None) -> None:
        self._wrapper, self._levels = model, levels(model)
        net = self._levels[-1]
        if not hasattr(net, "module_"):
            raise NotFittedError(f"the {type(net).__name__} is not fitted; fit it first.")
        if not any(base.__name__ == "NeuralNetRegressor" for base in type(net).__mro__):
            raise TypeError(
                f"cannot repair a {type(net).__name__}; of skorch, a NeuralNetRegressor is supported. Pass its "
                "network, the attribute module_."
            )
        if any(isinstance(level, TransformedTargetRegressor) for level in self._levels):
            raise TypeError(
                f"cannot repair a {type(net).__name__} inside a TransformedTargetRegressor. Transform the target "
                "in the network, or before it is fitted."
            )
        super().__init__(net.module_, output=output)

    @property
    def model(self) -> Any:
        """The wrapper."""
        return self._wrapper

    @property
    def n_features(self) -> int | None:
        """Number of columns that the first step, or else the network, takes."""
        alone = len(self._levels) == 1
        width: int | None = super().n_features if alone else getattr(self._wrapper, "n_features_in_", None)
        return width

    def _inputs(self, x: Any) -> Inputs:
        if not isinstance(x, torch.Tensor):  # which the steps before the network have made
            x = before_last(self._levels, x)
        return super()._inputs(x)

    def _edited(self, weights: Weights) -> "SkorchAdapter":
        edited, wrapper = super()._edited(weights), copy.deepcopy(self._wrapper)
        levels(wrapper)[-1].module_.load_state_dict(edited.model.state_dict())
        twin = SkorchAdapter.__new__(SkorchAdapter)
        twin.__setstate__(self.__getstate__() | {"model": wrapper})
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"model": self._wrapper}
