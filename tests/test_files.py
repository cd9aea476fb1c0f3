"""Files that appear whole or not at all."""

import pytest

from esvdfair.files import whole_file
from esvdfair.versions import version_of


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


def test_versions_of_what_is_installed_and_of_what_is_not():
    assert version_of("numpy") == __import__("numpy").__version__
    assert version_of("no-such-package") is None
