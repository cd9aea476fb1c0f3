"""Files that appear whole or not at all; arrays and a header in one file."""

import json
import os
import tracemalloc
import zipfile
from contextlib import suppress

import numpy as np
import pytest

from esvdfair.files import read_arrays, version_of, whole_file, whole_files, write_arrays


def test_a_file_takes_its_name_at_the_end_and_a_failure_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def write(content, error=None):
        with whole_file(path) as file:
            file.write(content)
            assert path.read_bytes() == b"old"
            if error:
                raise error

    with pytest.raises(OSError, match="disk"):
        write(b"ne", OSError("the disk is full"))
    assert path.read_bytes() == b"old"
    write(b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]


def test_several_files_take_their_names_together(tmp_path):
    model, record = tmp_path / "a.bin", tmp_path / "a.json"
    record.write_text("old")
    with whole_files(model, record) as places:
        places[model].write_text("model")
        places[model].with_name("a.bin.data").write_text("beside it")
        places[record].write_text("new")
        assert record.read_text() == "old"
        assert not model.exists()
    assert record.read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.bin.data", "a.json"]


def test_a_file_that_has_appeared_is_kept_and_none_is_written(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"

    def write():
        with whole_files(first, second, replace=False) as places:
            for place in places.values():
                place.write_text("new")
            second.write_text("of another process")

    with pytest.raises(FileExistsError, match=r"b' has appeared meanwhile; nothing was written"):
        write()
    assert [p.name for p in tmp_path.iterdir()] == ["b"]
    assert second.read_text() == "of another process"


def test_a_killed_process_leaves_no_record_of_another_model(tmp_path, monkeypatch):
    """Between the renames: the new model with no record, never with the old one."""
    model, record = tmp_path / "a", tmp_path / "a.json"
    model.write_text("old")
    record.write_text("old")
    replace, calls = os.replace, []

    def killed(source, target):
        if calls:
            raise KeyboardInterrupt
        calls.append(target)
        replace(source, target)

    def write():
        with whole_files(model, record) as places:
            for place in places.values():
                place.write_text("new")

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write()
    assert model.read_text() == "new"
    assert not record.exists()


def test_versions_of_what_is_installed_and_of_what_is_not():
    assert version_of("numpy") == __import__("numpy").__version__
    assert version_of("no-such-package") is None


# --- arrays and a header -------------------------------------------------------------------------------------------


ARRAYS = {"scatters": np.arange(32.0).reshape(2, 4, 4), "counts": np.array([2, 5])}


@pytest.fixture
def path(tmp_path):
    write_arrays(tmp_path / "a", "moments", 9, {"labels": ["a", "b"]}, ARRAYS)
    return tmp_path / "a"


def test_plain_numpy_reads_a_file_and_so_do_we(path):
    header, arrays = read_arrays(path, "moments", 9)
    assert header == {"format": "esvdfair-moments-9", "labels": ["a", "b"]}
    with np.load(path) as file:
        assert json.loads(file["header.json"]) == header
        for name, values in ARRAYS.items():
            np.testing.assert_array_equal(file[name], values)
            np.testing.assert_array_equal(arrays[name], values)
            assert arrays[name].dtype == values.dtype
    again = path.with_name("again")
    write_arrays(again, "moments", 9, {"labels": ["a", "b"]}, ARRAYS)
    assert again.read_bytes() == path.read_bytes()


def pack(path, parts, comment=b"", compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
        archive.comment = comment


def unpacked(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}, archive.comment


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("scatters.npy", lambda content: content.replace(b"'<f8'", b"'<f4'")),
        ("scatters.npy", lambda content: content[:-8] + np.float64(7).tobytes()),
        ("scatters.npy", lambda content: content + bytes(8)),
        ("scatters.npy", lambda content: content.replace(b"(2, 4, 4)", b"(4, 2, 4)")),
        ("header.json", lambda content: content.replace(b'["a", "b"]', b'["b", "a"]')),
        ("header.json", lambda content: content.replace(b"moments-9", b"moments-8")),
        ("header.json", lambda content: b"[" * 100_000),
        ("header.json", lambda content: b'{"format": ' * 50_000),
    ],
)
def test_a_changed_file_is_refused(path, name, spoil):
    parts, comment = unpacked(path)
    assert spoil(parts[name]) != parts[name]
    pack(path, parts | {name: spoil(parts[name])}, comment)
    with pytest.raises(ValueError, match=r"a' is not a moments file of esvdfair, or damaged \("):
        read_arrays(path, "moments", 9)


def test_files_of_another_kind_are_refused(path, tmp_path):
    with pytest.raises(ValueError, match="format 'esvdfair-moments-9', expected 'esvdfair-summary-9'"):
        read_arrays(path, "summary", 9)
    path.write_text("not a zip")
    with pytest.raises(ValueError, match="not a moments file"):
        read_arrays(path, "moments", 9)
    with path.open("wb") as file:
        np.savez(file, header=np.array([{"format": "x"}], dtype=object))  # a pickle, and never run
    with pytest.raises(ValueError, match="not a moments file"):
        read_arrays(path, "moments", 9)
    with pytest.raises(FileNotFoundError):
        read_arrays(tmp_path / "nowhere", "moments", 9)


def test_a_bomb_is_not_unpacked(path):
    parts, comment = unpacked(path)
    pack(path, parts | {"scatters.npy": bytes(10**7)}, comment, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 30_000
    tracemalloc.start()
    with pytest.raises(ValueError, match="compressed parts"):
        read_arrays(path, "moments", 9)
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


def test_mutated_files_are_refused_or_the_same(path):
    """Bytes changed, cut out, doubled or cut off, 1,000 times."""
    whole, rng, same = path.read_bytes(), np.random.default_rng(0), 0
    for _ in range(1000):
        place, kind = int(rng.integers(len(whole))), rng.integers(5)
        end = place + int(rng.integers(1, 9))
        middle = [rng.bytes(1), b"", whole[place:end] * 2, bytes(end - place), None][kind]
        changed = whole[:place] if middle is None else whole[:place] + middle + whole[place + 1 if kind == 0 else end :]
        path.write_bytes(changed)
        with suppress(ValueError):
            np.testing.assert_array_equal(read_arrays(path, "moments", 9)[1]["scatters"], ARRAYS["scatters"])
            same += 1
    assert same < 300  # what the zip says twice, dates, permissions


def test_a_failed_save_leaves_no_file(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(OSError, match="No space"):
        write_arrays(tmp_path / "a", "moments", 9, {}, ARRAYS)
    assert list(tmp_path.iterdir()) == []
