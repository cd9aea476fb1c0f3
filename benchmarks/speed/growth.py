"""3. Growth of time and memory over rows and over width."""

from collections.abc import Sequence

from speed.measure import Goal, Section, result, run_worker, slope

LONG, SHORT = "transport", "parity"


def run(
    rows: Sequence[int], width: int, *, memory: tuple[int, int], widths: Sequence[int], at: int, threads: int
) -> Section:
    """Streaming fits, each in a process of its own.

    Parameters
    ----------
    rows : numbers of rows of the first table, at one width
    memory : two of them, for each method, whose peaks are compared
    widths : of the second table, at ``at`` rows
    """

    def measure(method: str, rows: int, width: int) -> dict[str, float]:
        return result(run_worker("fit", method, rows, width, threads=threads))

    parity = {n: measure(SHORT, n, width) for n in sorted({*rows, *memory})}
    transport = {n: measure(LONG, n, width) for n in memory}
    by_width = {n: measure(SHORT, at, n) for n in widths}
    few, many = memory
    goals = [
        Goal(f"{name}: peak at {many:,} rows over that at {few:,}", found[many]["peak"] / found[few]["peak"], 1.2)
        for name, found in ((SHORT, parity), (LONG, transport))
    ]
    first: list[Sequence[object]] = [("method", "rows", "s", "peak, MB")]
    for name, found in ((SHORT, parity), (LONG, transport)):
        first += [(name, f"{n:,}", f"{m['seconds']:.2f}", f"{m['peak']:.0f}") for n, m in found.items()]
    second: list[Sequence[object]] = [("method", "width", "s", "peak, MB")]
    second += [(SHORT, n, f"{m['seconds']:.2f}", f"{m['peak']:.0f}") for n, m in by_width.items()]
    slopes = [("log-log slope of", "time, all", "time, last two", "peak, all", "peak, last two")]
    slopes += [_slopes("rows", parity), _slopes("width", by_width)]
    return Section(
        "Growth",
        f'`ESVDFair(network, method=…, targets="labels").fit(make_batches)`: rows are made batch by batch (which is in '
        f"the time) and streamed through a network of one hidden layer. First table: width {width}. Second: {at:,} "
        "rows. The peak is the process's largest resident size, with Python, torch and SciPy in it.",
        [first, second, slopes],
        goals,
        [
            "Over rows the time goes from what a fit costs anyway (the factorisations, judging) to one batch after "
            "another: slope 1 at the end. The peak rises until the bounded samples are full (60,000 rows that fit, "
            "100,000 that judge) and then stays. Over the width XᵀX grows as its square, the factorisations as its "
            "cube.",
        ],
    )


def _slopes(name: str, found: dict[int, dict[str, float]]) -> tuple[str, ...]:
    sizes = list(found)
    values = []
    for part in ("seconds", "peak"):
        measured = [m[part] for m in found.values()]
        values += [slope(sizes, measured), slope(sizes[-2:], measured[-2:])]
    return (name, *(f"{value:.2f}" for value in values))
