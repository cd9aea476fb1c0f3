"""CSV, in chunks of whole records that can be found again by their place in the file."""

import csv
import hashlib
import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from esvdfair.tables.records import last_end, record_ends
from esvdfair.tables.sources import Chunk, readable
from esvdfair.tables.words import listing

PIECE = 4 * 2**20
"""Bytes without a line end that no table has: every line of twice as many holds such a piece."""
BLOCK = 8 * 2**20
"""Bytes of a chunk, about."""
_MARK = b"\xef\xbb\xbf"


class CsvSource:
    """A CSV file; each chunk is parsed under the file's header, as if it were a file of its own."""

    copy: Any = None

    def __init__(self, path: Path, place: Path) -> None:
        self.path, self._place = path, place
        self.size = self.held_size = place.stat().st_size
        with place.open("rb") as file:
            start = file.read(2 * PIECE)
        if not start.strip():
            raise ValueError(f"{str(path)!r} is empty; a table with a header and rows is needed.")
        with readable(path):
            if b"\0" in start[:PIECE]:
                raise ValueError("it is neither Parquet nor text in UTF-8.")
            _check_line(start[:PIECE], 1)
            self._header, self._body = _header(start)
            _check_names(self._header)
            self.columns = [str(name) for name in self._parse(b"", None, {}).columns]

    def plan(self, parts: int = 1) -> tuple[list[Chunk], str]:
        """All chunks, about ``parts`` at the least, and the SHA-256 of the file."""
        digest = hashlib.sha256()
        block = min(BLOCK, -(-self.size // parts))
        chunks: list[Chunk] = []
        lines, start, pending = 1, 0, b""
        with readable(self.path), self._place.open("rb") as file:
            while piece := file.read(PIECE):
                digest.update(piece)
                _check_line(piece, lines)
                lines += piece.count(b"\n")
                pending += piece
                while len(pending) >= block:
                    end = last_end(pending[:block]) or last_end(pending)
                    if not end:
                        _check_record(pending, lines)
                        break
                    self._add(chunks, start, start + end)
                    start, pending = start + end, pending[end:]
        self._add(chunks, start, start + len(pending))
        return chunks, digest.hexdigest()

    def frames(
        self, chunks: Sequence[Chunk], columns: Sequence[str], dtypes: Mapping[str, Any], *, strict: bool = False
    ) -> Iterator[tuple[Chunk, pd.DataFrame]]:
        """Each chunk and its rows; see :class:`Source`."""
        names = None if strict else list(dict.fromkeys(columns))  # with names, pandas takes rows of any length
        with self._place.open("rb") as file:
            for chunk in chunks:
                file.seek(chunk.start)
                with readable(self.path):
                    frame = self._rows(file.read(chunk.stop - chunk.start), chunk, names, dtypes)
                yield chunk, frame[list(columns)]

    def _add(self, chunks: list[Chunk], start: int, stop: int) -> None:
        """Append a chunk, unless all of it is header."""
        start = max(start, self._body)
        if stop > start:
            chunks.append(Chunk(len(chunks), start, stop, stop))

    def _rows(self, block: bytes, chunk: Chunk, names: list[str] | None, dtypes: Mapping[str, Any]) -> pd.DataFrame:
        try:
            return self._parse(block, names, dtypes)
        except pd.errors.ParserError as error:
            shift = self._lines_before(chunk) - self._header.count(b"\n")
            text = re.sub(r"(?<=line |.row )\d+", lambda found: str(int(found[0]) + shift), str(error))
            raise ValueError(text) from None

    def _parse(self, block: bytes, names: list[str] | None, dtypes: Mapping[str, Any]) -> pd.DataFrame:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # more fields than the header names
            frame = pd.read_csv(
                io.BytesIO(self._header + block), low_memory=False, index_col=False, usecols=names, dtype=dict(dtypes)
            )
        frame.columns = frame.columns.map(str)
        return frame

    def _lines_before(self, chunk: Chunk) -> int:
        """Line ends in the file before a chunk."""
        lines, left = 0, chunk.start
        with self._place.open("rb") as file:
            while left > 0:
                piece = file.read(min(left, PIECE))
                lines, left = lines + piece.count(b"\n"), left - len(piece)
        return lines


def _check_line(piece: bytes, line: int) -> None:
    if len(piece) == PIECE and b"\n" not in piece and b"\r" not in piece:
        raise ValueError(f"line {line} is longer than {PIECE // 2**20} MB, as no line of a table is.")


def _check_record(pending: bytes, lines: int) -> None:
    if len(pending) > BLOCK + 2 * PIECE:
        line = lines - pending.count(b"\n")
        raise ValueError(
            f"the row that starts in line {line} goes on for more than {len(pending) // 2**20} MB; a quotation mark "
            "may not be closed."
        )


def _header(start: bytes) -> tuple[bytes, int]:
    """The line with the names, without a byte order mark, and where it ends in the file."""
    mark = len(_MARK) if start.startswith(_MARK) else 0
    text = start[mark:]
    blank = len(text) - len(text.lstrip())  # lines of nothing are skipped before the header as elsewhere
    first = max(text.rfind(b"\n", 0, blank), text.rfind(b"\r", 0, blank)) + 1
    ends = record_ends(text[first:])
    end = first + int(ends[0]) if len(ends) else len(text)
    end += text[end - 1 : end + 1] == b"\r\n"
    header = text[first:end]
    return header if header.endswith((b"\n", b"\r")) else header + b"\n", mark + end


def _check_names(header: bytes) -> None:
    names = next(csv.reader(io.StringIO(header.decode("utf-8", errors="replace"), newline=None)))
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if name and names.count(name) > 1})
        if twice:
            raise ValueError(f"its header has {listing(twice)} more than once; give each column a name of its own.")
