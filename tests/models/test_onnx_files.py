import errno
import itertools
import os
import stat

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info

from esvdfair.models import adapt
from esvdfair.models.onnx import OnnxAdapter, save_model
from esvdfair.models.onnx_files import external_files

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 6))
W0, W1 = RNG.normal(size=(6, 8)), RNG.normal(size=(8, 1))
OTHER = (RNG.normal(size=(1, 8)), None)


def network():
    """Two layers; the weight of the second is a Constant node."""
    constant = numpy_helper.from_array(W1.astype(np.float32), "w1")
    nodes = [
        make_node("Constant", [], ["w1"], value=constant),
        make_node("MatMul", ["x", "w0"], ["z"], "first"),
        make_node("Relu", ["z"], ["h"]),
        make_node("MatMul", ["h", "w1"], ["y"], "second"),
    ]
    x, y = (make_tensor_value_info(name, TensorProto.FLOAT, ["rows", width]) for name, width in (("x", 6), ("y", 1)))
    tensors = [numpy_helper.from_array(W0.astype(np.float32), "w0")]
    return make_model(make_graph(nodes, "g", [x], [y], tensors), opset_imports=[make_opsetid("", 17)], ir_version=8)


DATA = network().SerializeToString()
EXPECTED = OnnxAdapter(DATA).predict(X)


def move_out(tensor, location="weights.bin", **places):
    """Point a tensor to external data; its bytes."""
    data = tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **places}.items():
        tensor.external_data.add(key=key, value=str(value))
    return data


def external(folder, location="weights.bin", *, file=None, **places):
    """Write a model whose first weight is in external data, in `file` if not where the model says; its path."""
    model = network()
    data = move_out(model.graph.initializer[0], location, **places)
    file = folder / location if file is None else file
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"#" * int(places.get("offset", 0)) + data)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def files(folder):
    return sorted(path.name for path in folder.iterdir())


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [str, os.fspath, lambda path: path])
def test_reads_a_path(tmp_path, kind):
    path = tmp_path / "model.onnx"
    path.write_bytes(DATA)
    np.testing.assert_array_equal(adapt(kind(path)).predict(X), EXPECTED)


@pytest.mark.parametrize(
    ("location", "places"),
    [
        ("weights.bin", {}),
        ("weights.bin", {"offset": 64, "length": W0.size * 4}),
        ("weights.bin", {"offset": 3}),
        ("data/of/weights.bin", {}),
        ("./data/../weights.bin", {"offset": 0}),
    ],
)
def test_reads_external_data(tmp_path, location, places, monkeypatch):
    (tmp_path / "data").mkdir()
    path = external(tmp_path, location, **places)
    np.testing.assert_array_equal(OnnxAdapter(path).predict(X), EXPECTED)
    monkeypatch.chdir(tmp_path)
    np.testing.assert_array_equal(OnnxAdapter("model.onnx").predict(X), EXPECTED)


def test_external_data_may_have_more_behind_it(tmp_path):
    path = external(tmp_path)
    with (tmp_path / "weights.bin").open("ab") as file:
        file.write(b"the next tensor")
    np.testing.assert_array_equal(OnnxAdapter(path).predict(X), EXPECTED)


def test_external_data_of_a_constant_node(tmp_path):
    model = network()
    (tmp_path / "weights.bin").write_bytes(move_out(model.graph.node[0].attribute[0].t))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    np.testing.assert_array_equal(OnnxAdapter(tmp_path / "model.onnx").predict(X), EXPECTED)


def test_a_link_to_a_file_in_the_folder_is_followed(tmp_path):
    path = external(tmp_path, "link.bin", file=tmp_path / "weights.bin")
    (tmp_path / "link.bin").symlink_to("weights.bin")
    np.testing.assert_array_equal(OnnxAdapter(path).predict(X), EXPECTED)


def by_dots(folder, outside):
    return external(folder, "../outside/secret.bin", file=outside)


def by_dots_inside(folder, outside):
    (folder / "data").mkdir()
    return external(folder, "data/../../outside/secret.bin", file=outside)


def by_absolute_path(folder, outside):
    return external(folder, str(outside), file=outside)


def by_absolute_path_inside(folder, outside):
    return external(folder, str(folder / "weights.bin"), file=folder / "weights.bin")


def by_link(folder, outside):
    (folder / "weights.bin").symlink_to(outside)
    return external(folder, "weights.bin", file=outside)


def by_linked_folder(folder, outside):
    (folder / "data").symlink_to(outside.parent)
    return external(folder, "data/secret.bin", file=outside)


def by_nothing(folder, outside):
    return external(folder, "", file=outside)


@pytest.mark.parametrize(
    "place",
    [by_dots, by_dots_inside, by_absolute_path, by_absolute_path_inside, by_link, by_linked_folder, by_nothing],
)
def test_external_data_outside_the_folder_is_refused(tmp_path, place):
    folder, outside = tmp_path / "model", tmp_path / "outside" / "secret.bin"
    folder.mkdir()
    outside.parent.mkdir()
    path = place(folder, outside)
    with pytest.raises(ValueError, match=r"external data of tensor 'w0' is at .*outside the model's folder"):
        OnnxAdapter(path)


def test_external_data_hidden_in_a_subgraph_is_refused(tmp_path):
    model = network()
    inner = make_graph([], "inner", [], [make_tensor_value_info("t", 1, [6, 8])], list(model.graph.initializer))
    inner.initializer[0].name = "t"
    move_out(inner.initializer[0], "/etc/passwd")
    yes = numpy_helper.from_array(np.array(True), "yes")
    model.graph.initializer.append(yes)
    model.graph.node.append(make_node("If", ["yes"], ["unused"], then_branch=inner, else_branch=inner))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match="external data of tensor 't' is at '/etc/passwd', outside"):
        OnnxAdapter(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ({"length": 193}, "should be bytes 0 to 193 of 'weights.bin', which has 192: the file is truncated"),
        ({"offset": -1}, "should be bytes -1 to 191"),
        ({"length": -5}, "should be bytes 0 to -5"),
        ({"length": 10**15}, "truncated, or belongs to another model"),
        ({"offset": "many"}, "offset or length that is not a number"),
        ({"length": 100}, r"w0.*100 bytes.*192"),
    ],
)
def test_external_data_of_another_size(tmp_path, places, said):
    path = external(tmp_path)
    model = onnx.load(path, load_external_data=False)
    for key, value in places.items():
        model.graph.initializer[0].external_data.add(key=key, value=str(value))
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match=said):
        OnnxAdapter(path)


def test_external_data_longer_than_its_tensor(tmp_path):
    path = external(tmp_path, length=200)
    with (tmp_path / "weights.bin").open("ab") as file:
        file.write(b"the next tensor")
    with pytest.raises(ValueError, match=r"tensor 'w0' of shape \(6, 8\) holds 200 bytes; it needs 192"):
        OnnxAdapter(path)


def test_external_data_that_is_missing(tmp_path):
    path = external(tmp_path)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"tensor 'w0' is at 'weights\.bin', and there is no such file beside"):
        OnnxAdapter(path)


def test_external_data_that_is_no_file(tmp_path):
    path = external(tmp_path)
    (tmp_path / "weights.bin").unlink()
    os.mkfifo(tmp_path / "weights.bin")
    with pytest.raises(ValueError, match="not a regular file"):
        OnnxAdapter(path)


def test_external_data_that_is_a_circle_of_links(tmp_path):
    path = external(tmp_path)
    (tmp_path / "weights.bin").unlink()
    (tmp_path / "weights.bin").symlink_to("weights.bin")
    with pytest.raises(FileNotFoundError, match="no such file beside the model"):
        OnnxAdapter(path)


def test_bytes_lead_to_no_external_data(tmp_path):
    with pytest.raises(ValueError, match=r"'w0' is in external data \('weights.bin'\).* pass the path"):
        OnnxAdapter(external(tmp_path).read_bytes())


def test_more_than_protobuf_can_hold(tmp_path, monkeypatch):
    path = external(tmp_path)
    monkeypatch.setattr("esvdfair.models.onnx_files.LARGEST", len(DATA))
    with pytest.raises(ValueError, match="with its external data is larger than 2 GB"):
        OnnxAdapter(path)
    with pytest.raises(ValueError, match=r"\(500 bytes\) is larger than 2 GB"):
        OnnxAdapter(b"#" * 500)


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x80\x04K\x01.", b"a,b,c\n1,2,3\n" * 1000, b"\0" * 100])
def test_not_a_model(tmp_path, content):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    for source, name in ((path, r"model\.onnx' is"), (content, rf"the model \({len(content)} bytes\) is")):
        with pytest.raises(ValueError, match=name + " (empty|not an ONNX model)") as error:
            OnnxAdapter(source)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("length", range(1, len(DATA), 29))
def test_truncated(length):
    with pytest.raises(ValueError, match=r"not an ONNX model, or it is truncated|not a valid ONNX model") as error:
        OnnxAdapter(DATA[:length])
    assert "\n" not in str(error.value)


def test_no_graph():
    with pytest.raises(ValueError, match="truncated: it has no graph with an output"):
        OnnxAdapter(onnx.ModelProto(ir_version=8).SerializeToString())


def test_external_data_of_unknown_type(tmp_path):
    path = external(tmp_path)
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].data_type = 99
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match="tensor 'w0' is of unknown type 99"):
        OnnxAdapter(path)


def test_a_model_that_breaks_the_rules():
    model = network()
    model.graph.node[1].input[1] = "nowhere"
    with pytest.raises(ValueError, match=r"is not a valid ONNX model: .*nowhere") as error:
        OnnxAdapter(model.SerializeToString())
    assert "\n" not in str(error.value)


def test_missing_file_and_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file '.*none\.onnx'"):
        OnnxAdapter(tmp_path / "none.onnx")
    with pytest.raises(IsADirectoryError, match="is a directory; an ONNX file is needed"):
        OnnxAdapter(tmp_path)


# --- writing ----------------------------------------------------------------------------------------------------------


def test_saves_what_it_holds(tmp_path):
    path = tmp_path / "fair.onnx"
    adapter = OnnxAdapter(DATA).replace({"second": OTHER})
    for _ in range(2):  # the second time over the first file
        save_model(adapter.model, path)
        assert path.read_bytes() == adapter.model
        assert files(tmp_path) == ["fair.onnx"]
    onnx.checker.check_model(path, full_check=True)


def test_a_new_file_has_the_usual_permissions(tmp_path):
    (tmp_path / "usual").touch()
    save_model(DATA, tmp_path / "fair.onnx")
    assert stat.S_IMODE((tmp_path / "fair.onnx").stat().st_mode) == stat.S_IMODE((tmp_path / "usual").stat().st_mode)


def test_external_data_stays_external(tmp_path):
    (tmp_path / "out").mkdir()
    original = external(tmp_path, offset=64)
    before = original.read_bytes(), (tmp_path / "weights.bin").read_bytes()
    adapter = OnnxAdapter(original).replace({"first": (2 * W0.T, None)})
    path = tmp_path / "out" / "fair.onnx"
    save_model(adapter.model, path, like=original)
    assert files(tmp_path / "out") == ["fair.onnx", "fair.onnx.data"]
    assert (path.with_name("fair.onnx.data")).read_bytes() == (2 * W0).astype(np.float32).tobytes()
    assert len(path.read_bytes()) < len(adapter.model)
    onnx.checker.check_model(path, full_check=True)
    for again in (OnnxAdapter(path).predict(X), adapt(adapter.model).predict(X), 2 * EXPECTED):
        np.testing.assert_allclose(again, adapter.predict(X), rtol=1e-6)
    assert (original.read_bytes(), (tmp_path / "weights.bin").read_bytes()) == before
    # Nothing else has changed: onnx's own reader finds the same model but for one tensor.
    written, read = onnx.load(path), onnx.load(original)
    written.graph.initializer[0].CopyFrom(read.graph.initializer[0])
    assert written == read


def test_files_with_external_data_are_named_without_being_opened(tmp_path):
    path = external(tmp_path, "data/of/weights.bin")
    (tmp_path / "data/of/weights.bin").unlink()
    assert external_files(path) == ["data/of/weights.bin"]
    path.write_bytes(DATA)
    assert external_files(str(path)) == []


def test_external_data_starts_on_a_page(tmp_path):
    model = network()
    tensors = [model.graph.initializer[0], model.graph.node[0].attribute[0].t]
    sizes = [len(tensor.raw_data) for tensor in tensors]
    (tmp_path / "weights.bin").write_bytes(
        b"".join(move_out(t, offset=o) for t, o in zip(tensors, [0, sizes[0]], strict=True))
    )
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    save_model(tmp_path / "model.onnx", tmp_path / "fair.onnx")
    written = onnx.load(tmp_path / "fair.onnx", load_external_data=False)
    both = [written.graph.initializer[0], written.graph.node[0].attribute[0].t]
    assert sorted(tensor.external_data[1].value for tensor in both) == ["0", "4096"]
    np.testing.assert_array_equal(OnnxAdapter(tmp_path / "fair.onnx").predict(X), EXPECTED)


def test_saves_over_its_own_files(tmp_path):
    path = external(tmp_path, "model.onnx.data")
    adapter = OnnxAdapter(path).replace({"second": OTHER})
    save_model(adapter.model, path, like=path)
    assert files(tmp_path) == ["model.onnx", "model.onnx.data"]
    np.testing.assert_array_equal(OnnxAdapter(path).predict(X), adapter.predict(X))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_disk_leaves_what_was_there(tmp_path, failing, monkeypatch):
    path = external(tmp_path, "model.onnx.data")
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    calls = itertools.count()

    def fsync(descriptor):
        if next(calls) == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        save_model(OnnxAdapter(path).replace({"first": (2 * W0.T, None)}).model, path, like=path)
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before


def test_places_where_nothing_can_be_written(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"cannot write a model to .*: it is a directory"):
        save_model(DATA, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no folder '.*nowhere'"):
        save_model(DATA, tmp_path / "nowhere" / "fair.onnx")
    assert files(tmp_path) == []


def test_like_must_be_the_same_model(tmp_path):
    other = network()
    del other.graph.node[3]
    other.graph.node[2].output[0] = "y"
    other.graph.output[0].CopyFrom(make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 8]))
    del other.graph.node[0]
    with pytest.raises(ValueError, match="has 2 tensors and the one it should be like 1"):
        save_model(DATA, tmp_path / "fair.onnx", like=other.SerializeToString())
    assert files(tmp_path) == []


@pytest.mark.parametrize("damage", ["weights.bin", "model.onnx"])
def test_a_written_model_does_not_need_its_original(tmp_path, damage):
    path = external(tmp_path)
    adapter = OnnxAdapter(path)
    (tmp_path / damage).unlink()
    save_model(adapter.replace({}).model, tmp_path / "fair.onnx")
    np.testing.assert_array_equal(OnnxAdapter(tmp_path / "fair.onnx").predict(X), EXPECTED)


def test_a_nul_in_a_path_is_named(tmp_path):
    said = "holds a NUL character, which no file name has"
    for path in ("a\0b.onnx", tmp_path / "a\0b.onnx"):
        with pytest.raises(ValueError, match=said):
            adapt(path)
    model = external(tmp_path, "weights.bin", file=tmp_path / "weights.bin")
    with pytest.raises(ValueError, match=said):
        save_model(model, tmp_path / "a\0b.onnx")
    with pytest.raises(ValueError, match=said):
        adapt(external(tmp_path, "a\0b.bin", file=tmp_path / "weights.bin"))
