"""4. One and two processes of `torch.distributed` that share the rows."""

import tempfile

from speed.measure import Section, result, run_worker


def run(rows: int, width: int, repeats: int) -> Section:
    """Moments alone and a whole fit, over 1 and 2 processes of one thread each."""
    times = {world: _run(world, rows, width, repeats) for world in (1, 2)}
    table = [("what", "1 process, s", "2 processes, s", "speed-up")]
    for part, name in (("moments", "capture, moments, all-reduce"), ("fit", "`ESVDFair.fit`, parity")):
        one, two = times[1][part], times[2][part]
        table.append((name, f"{one:.2f}", f"{two:.2f}", f"{one / two:.2f}"))
    return Section(
        "Processes",
        f"{rows:,} rows, width {width}, streamed in batches of 8,192; process i of 2 takes every second batch; gloo, "
        f"one thread a process. Seconds from a common start line to a common finish line, fewest of {repeats}. The "
        "factorisations and the judging of a fit are done by every process for itself, so that only the pass can speed "
        "up.",
        [table],
    )


def _run(world: int, rows: int, width: int, repeats: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [run_worker("rank", own, world, folder, rows, width, repeats, threads=1) for own in range(world)]
        first, *_ = [result(rank) for rank in ranks]
    return first
