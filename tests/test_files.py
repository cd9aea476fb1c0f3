"""Files that appear whole or not at all."""

import os

import pytest

from esvdfair.files import version_of, whole_file, whole_files


def test_a_file_takes_its_name_at_the_end(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with whole_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]


def test_a_failure_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def fail():
        with whole_file(path) as file:
            file.write(b"ne")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk"):
        fail()
    assert path.read_bytes() == b"old"
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


def test_folders_of_killed_processes_are_removed_and_others_are_not(tmp_path):
    old, new = tmp_path / ".esvdfair-old", tmp_path / ".esvdfair-new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "half").write_text("a file")
    os.utime(old, (0, 0))
    with whole_files(tmp_path / "a") as places:
        places[tmp_path / "a"].write_text("a")
        os.utime(places[tmp_path / "a"].parent, (0, 0))  # of a process that takes long, but lives
        with whole_files(tmp_path / "b") as others:
            others[tmp_path / "b"].write_text("b")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".esvdfair-new", "a", "b"]


def test_versions_of_what_is_installed_and_of_what_is_not():
    assert version_of("numpy") == __import__("numpy").__version__
    assert version_of("no-such-package") is None
