"""Where the records of a CSV file end: at a line end that is not inside quotation marks."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_QUOTE, _COMMA, _LF, _CR = b'",\n\r'
Places = NDArray[np.intp]


def last_end(block: bytes) -> int:
    """Length of the whole records at the start of a block that starts with a record; 0 when none ends in it."""
    if b'"' not in block:
        return max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
    ends = record_ends(block)
    return int(ends[-1]) if len(ends) else 0


def record_ends(block: bytes) -> Places:
    """Positions behind every line end outside quotation marks, in a block that starts with a record."""
    data = np.frombuffer(block, dtype=np.uint8)
    ends = np.flatnonzero((data == _LF) | (data == _CR))
    if b'"' in block:
        ends = ends[np.searchsorted(_marks(data), ends) % 2 == 0]
    return ends + 1


def _marks(data: NDArray[np.uint8]) -> Places:
    """Positions of the quotation marks that open and close fields, in turn; a doubled one may close and open again."""
    marks = np.flatnonzero(data == _QUOTE)
    return marks if _in_pairs(data, marks) else np.array(_marks_one_by_one(data, marks), dtype=np.intp)


def _in_pairs(data: NDArray[np.uint8], marks: Places) -> bool:
    """Whether every other mark stands at the start of a field and those between at the end of one."""
    around = np.concatenate([[_LF], data, [_LF]]).astype(np.uint8)
    before, after = around[marks[0::2]], around[marks[1::2] + 2]
    return bool(np.isin(before, [_COMMA, _LF, _CR, _QUOTE]).all() and np.isin(after, [_COMMA, _LF, _CR, _QUOTE]).all())


def _marks_one_by_one(data: NDArray[np.uint8], marks: Places) -> list[Any]:
    """As the parser does it: a mark opens at the start of a field only; inside, two of them stand for one."""
    found: list[Any] = []
    inside, skip = False, -1
    for place in marks.tolist():
        if place == skip:
            continue
        if not inside:
            inside = place == 0 or data[place - 1] in (_COMMA, _LF, _CR)
            found += [place] * inside
        elif place + 1 < len(data) and data[place + 1] == _QUOTE:
            skip = place + 1
        else:
            inside = False
            found.append(place)
    return found
