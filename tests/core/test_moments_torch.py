"""GroupMoments on torch tensors: same numbers, products on the tensor's own device."""

import numpy as np
import pytest

from esvdfair.core import moments as module
from esvdfair.core.moments import GroupMoments

torch = pytest.importorskip("torch", reason="needs the extra esvdfair[torch]")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_tensors_give_the_moments_of_their_values(dtype):
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(60, 2, 3))).to(getattr(torch, dtype))
    g, w = torch.tensor(rng.integers(0, 2, 60)), torch.tensor(rng.uniform(1, 2, 60))
    from_torch = GroupMoments().update(x[:20], g[:20], w[:20]).update(x[20:], g[20:], w[20:])
    from_numpy = GroupMoments().update(x.double().numpy(), g.numpy(), w.numpy())
    np.testing.assert_allclose(from_torch.scatters, from_numpy.scatters, rtol=1e-12, atol=1e-12)
    assert isinstance(from_torch.means, np.ndarray)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_column_beside_x_is_a_column_of_x(dtype):
    rng = np.random.default_rng(1)
    x = torch.tensor(rng.normal(size=(400, 3))).to(getattr(torch, dtype))
    codes, y, w = rng.integers(0, 2, 400), rng.normal(size=400) + 5, rng.uniform(0, 2, 400)
    for weight in (None, w):
        beside = GroupMoments().update_codes(x, ("a", "b"), codes, weight, beside=y)
        inside = GroupMoments().update_codes(np.column_stack([x.double(), y]), ("a", "b"), codes, weight)
        assert beside.width == 4
        np.testing.assert_allclose(beside.means, inside.means, rtol=1e-12)
        np.testing.assert_allclose(beside.scatters, inside.scatters, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="3 columns, the batches before had 4"):
        beside.update_codes(x, ("a", "b"), codes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_that_require_grad_are_read_without_it(dtype):
    x = torch.randn(10, 3, dtype=getattr(torch, dtype), requires_grad=True)
    assert not getattr(GroupMoments().update(x, [0, 1] * 5)._groups[0].mean, "requires_grad", False)


def test_a_tensor_in_main_memory_is_left_as_it_was():
    """NumPy reads it in place, so it must not write there."""
    x = torch.randn(20, 3, dtype=torch.float64)
    copy = x.clone()
    GroupMoments().update(x, [0, 1] * 10, np.linspace(0, 2, 20)).update(x, [0, 1] * 10)
    assert torch.equal(x, copy)


@pytest.mark.parametrize("torch_first", [True, False])
def test_arrays_and_tensors_can_be_merged(torch_first):
    x = np.random.default_rng(0).integers(-8, 8, size=(40, 3)).astype(np.float64)  # which bfloat16 holds exactly
    g = [0, 1] * 20
    tensor = torch.tensor(x[:20], dtype=torch.bfloat16)  # a dtype that NumPy lacks stays with torch
    first, second = GroupMoments().update(tensor, g[:20]), GroupMoments().update(x[20:], g[20:])
    assert isinstance(first._groups[0].mean, torch.Tensor)
    total = first.merge(second) if torch_first else second.merge(first)
    np.testing.assert_allclose(total.scatters, GroupMoments().update(x, g).scatters, rtol=1e-10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_in_a_tensor_is_an_error(dtype):
    x = torch.ones(4, 2, dtype=getattr(torch, dtype))
    x[1, 1] = float("nan")
    with pytest.raises(ValueError, match="1 of 4 rows"):
        GroupMoments().update(x, [0, 0, 1, 1])


def test_a_device_without_float64_is_a_clear_error(monkeypatch):
    def double(self):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    monkeypatch.setattr(torch.Tensor, "double", double)
    with pytest.raises(ValueError, match="has no float64"):
        GroupMoments().update(torch.ones(4, 2, dtype=torch.bfloat16), [0, 0, 1, 1])


def test_the_product_stays_on_the_device(monkeypatch):
    """Nothing but the finite check, one for each batch, brings values to the host."""

    def transfer(self, *args, **kwargs):
        raise AssertionError("a hidden transfer to the host")

    asked = []
    monkeypatch.setattr(module, "_all_finite", lambda found: asked.append(len(found)) or True)
    for name in ("cpu", "numpy", "item", "tolist", "__array__", "__bool__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, transfer)
    x = torch.ones(32, 5, dtype=torch.bfloat16)  # which NumPy cannot read in place, as if it were on a device
    moments = GroupMoments().update(x, ["a", "b"] * 16).update(x, ["a"] * 32)
    assert all(isinstance(m.scatter, torch.Tensor) for m in moments._groups.values())
    assert asked == [2, 1]


def test_one_matrix_product_for_each_group_of_a_batch(monkeypatch):
    product, seen = torch.Tensor.__matmul__, []
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: seen.append(tuple(a.shape)) or product(a, b))
    GroupMoments().update(torch.randn(90, 7, dtype=torch.bfloat16), ["a", "b", "c"] * 30)
    assert seen == [(7, 30)] * 3
