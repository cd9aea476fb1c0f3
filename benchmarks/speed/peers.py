"""Peers on the same activations: concept-erasure, Fairlearn, and a plain transcription of Algorithm 1."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq

from esvdfair.core.edits import PAPER_REDUCTIONS, edit_mean, edit_paper
from esvdfair.core.moments import GroupMoments
from speed.measure import BATCH, Goal, Section, interleaved, make_rows, network, seconds

Array = NDArray[np.float64]
Costs = Callable[[Array, Array, Array], Array]
Shrink = Callable[[float, float, float], float]
REDUCTIONS = dict(zip(("mean_reduction", "covariance_reduction"), PAPER_REDUCTIONS, strict=True))


def run(widths: Sequence[int], rows: int, *, transcribed: int, sample: int, repeats: int, threads: int) -> Section:
    """Times at each of the widths; the transcription at one of them, with ``sample`` of its directions timed."""
    table: list[Sequence[object]] = [("width", "who", "what its time includes", "s", "over ours")]
    goals = []
    for width in widths:
        x, groups, weight = activations(width, rows)
        ours, who = "esvdfair, mean edit", _contenders(x, groups, weight)
        times = interleaved({name: function for name, (function, _) in who.items()}, repeats)
        for name, (_, includes) in who.items():
            ratio = times[name] / times[ours]
            table.append((width, name, includes, f"{times[name]:.2f}", f"{ratio:.2f}"))
            if not name.startswith("esvdfair"):
                goals.append(Goal(f"{name}, width {width}, over our mean edit", ratio, 1.0, below=False))
    slow, goal = _transcription(transcribed, rows, sample)
    return Section(
        "Peers on the same activations",
        f"{rows:,} rows of the activations of one network, float64 for all, two groups, in memory. Every time goes "
        "from the activations to the fitted result: for us moments in batches of 8,192 and the closed-form edit of a "
        "square layer. The mean edit with infinite reduction and LEACE are the same map (checked in the run, with "
        "LEACE's safeguards off; its time is with its defaults). "
        f"Fewest seconds of {repeats} rounds.",
        [table, slow],
        [*goals, goal],
        [
            "`CorrelationRemover.fit` regresses every feature on the group and stops there: O(rows × width), no "
            "covariance, while LEACE and our edit need XᵀX, O(rows × width²). It has less work to do, the wider "
            "the layer; but its result must be applied to every row, now and at each prediction, with the "
            "sensitive attribute at hand, and it removes mean differences without regard to what that costs the "
            "layer's outputs. `fit_transform` is the time to repaired activations; our edit has that in the weights.",
            "The transcription is `algorithm_1` in `benchmarks/speed/peers.py`: Algorithm 1 as printed, errata put "
            f"right, with its loops and inverses. Its costs k_i were timed for {sample} of {transcribed} directions "
            "of each edit and multiplied up (each direction does the same work), all else in full. *one inverse* takes "
            "the inverse and XᵀX out of the loop, and runs in full. Both start from the activations, as does our time.",
        ],
    )


def activations(width: int, rows: int) -> tuple[Array, NDArray[np.intp], Array]:
    """What the second hidden layer of a network reads, the groups, and that layer's weight."""
    model, (x, _, groups) = network(width), make_rows(rows)
    with torch.no_grad():
        h = model[:2](torch.as_tensor(x)).double().numpy()
        weight = model[2].weight.double().numpy()
    return h, groups, weight


def _contenders(x: Array, groups: NDArray[np.intp], weight: Array) -> dict[str, tuple[Callable[[], object], str]]:
    """Who runs, and what is in the time."""
    from concept_erasure import LeaceEraser, LeaceFitter
    from fairlearn.preprocessing import CorrelationRemover

    width = x.shape[1]
    tensor, one_hot = torch.as_tensor(x), torch.nn.functional.one_hot(torch.as_tensor(groups), 2)
    beside, bias = np.column_stack([x, groups]), np.zeros(width)

    def leace(**options: object) -> LeaceEraser:
        fitter = LeaceFitter(width, 2, dtype=torch.float64, **options)
        for start in range(0, len(x), BATCH):
            fitter.update(tensor[start : start + BATCH], one_hot[start : start + BATCH])
        return fitter.eraser

    def remover() -> CorrelationRemover:
        return CorrelationRemover(sensitive_feature_ids=[width])

    edit = edit_mean(weight, gather(x, groups), reduction=np.inf, bias=bias)
    theirs = leace(shrinkage=False, constrain_cov_trace=False, svd_tol=1e-6)(tensor[:256]).numpy() @ weight.T
    if not np.allclose(x[:256] @ edit.weight_after.T + edit.bias_after, theirs, atol=1e-4 * np.abs(theirs).max()):
        raise RuntimeError("the mean edit and LEACE no longer agree; the comparison would be of different things.")
    return {
        "esvdfair, mean edit": (
            lambda: edit_mean(weight, gather(x, groups), reduction=np.inf, bias=bias),
            "moments, exact mean edit",
        ),
        "esvdfair, Algorithm 1": (
            lambda: edit_paper(weight, gather(x, groups), bias=bias, **REDUCTIONS),
            "moments, covariance and mean edit",
        ),
        "concept-erasure LeaceFitter": (leace, "update in the same batches, eraser"),
        "fairlearn CorrelationRemover.fit": (lambda: remover().fit(beside), "fit alone; nothing repaired yet"),
        "fairlearn CorrelationRemover.fit_transform": (
            lambda: remover().fit_transform(beside),
            "fit, repaired activations",
        ),
    }


def gather(x: Array, groups: NDArray[np.intp]) -> GroupMoments:
    moments = GroupMoments()
    for start in range(0, len(x), BATCH):
        moments.update_codes(x[start : start + BATCH], (0, 1), groups[start : start + BATCH])
    return moments


def _transcription(width: int, rows: int, sample: int) -> tuple[list[Sequence[object]], Goal]:
    """The table of Algorithm 1 three times over, and the goal of the literal one."""
    x, groups, weight = activations(width, rows)
    ours = seconds(lambda: edit_paper(weight, gather(x, groups), **REDUCTIONS))
    hoisted = seconds(lambda: algorithm_1(weight, x, groups, costs=costs_with_one_inverse, **REDUCTIONS))
    ours = min(ours, seconds(lambda: edit_paper(weight, gather(x, groups), **REDUCTIONS)))
    clocked = 0.0

    def sampled(v: Array, s: Array, x: Array) -> Array:
        nonlocal clocked
        inverse_once = seconds(lambda: costs_with_one_inverse(v, s, x))
        part = seconds(lambda: costs_by_direction(v[:, :sample], s, x))
        clocked += part * v.shape[1] / sample - part - 2 * inverse_once  # the two that the literal loop does not do
        return costs_with_one_inverse(v, s, x)

    literal = seconds(lambda: algorithm_1(weight, x, groups, costs=sampled, **REDUCTIONS)) + clocked
    table = [
        (f"Algorithm 1 at width {width}", "s", "over ours"),
        ("esvdfair: moments and `edit_paper`", f"{ours:.2f}", "1.00"),
        ("transcription, one inverse", f"{hoisted:.2f}", f"{hoisted / ours:.1f}"),
        ("transcription, literal", f"{literal:.0f}", f"{literal / ours:.0f}"),
    ]
    return table, Goal("literal transcription over ours", literal / ours, 25.0, below=False)


# --- Algorithm 1 as a reader of the paper would type it in ---------------------------------------------------------


def algorithm_1(
    w: Array, x: Array, groups: NDArray[np.intp], *, mean_reduction: float, covariance_reduction: float, costs: Costs
) -> Array:
    """(m, n) weight after the covariance edit and the mean edit, for inputs x (N, n) of two groups.

    Line by line from the paper, with its errata put right: a loop over the directions, inverses where it writes them.
    """
    x1, x2 = x[groups == 0], x[groups == 1]
    mean1, mean2 = x1.mean(axis=0), x2.mean(axis=0)
    centred1, centred2 = x1 - mean1, x2 - mean2
    m = centred1.T @ centred1 / (len(x1) - 1) - centred2.T @ centred2 / (len(x2) - 1)
    values, q = np.linalg.eigh(m)
    s_v = q @ np.diag(np.sqrt(np.abs(values)))
    w = _edit(w, s_v, x, 4, covariance_reduction, _cubic_root, costs)
    d = (mean1 - mean2)[None, :]
    s_e = np.linalg.cholesky(d.T @ d + 1e-5 * np.eye(len(d.T)))
    return _edit(w, s_e, x, 2, mean_reduction, lambda sigma, k, gamma: sigma * k / (k + gamma), costs)


def _edit(w: Array, s: Array, x: Array, power: int, reduction: float, shrink: Shrink, costs: Costs) -> Array:
    u, sigma, vt = np.linalg.svd(w @ s)
    k = costs(vt.T, s, x)
    budget = np.sum(sigma**power) / reduction

    def shrunk(gamma: float) -> list[float]:
        return [shrink(sigma[i], k[i], gamma) for i in range(len(sigma))]

    def excess(log_gamma: float) -> float:
        return float(np.sum(np.array(shrunk(np.exp(log_gamma))) ** power)) - budget

    scale = np.log(np.median(k))
    after = shrunk(np.exp(brentq(excess, scale - 60, scale + 60, xtol=1e-12)))
    total = np.zeros_like(w)
    for i in range(len(sigma)):
        total += after[i] * np.outer(u[:, i], vt[i])
    return total @ np.linalg.inv(s)


def _cubic_root(sigma: float, k: float, gamma: float) -> float:
    """The real root of ``k σ' − k σ + 2γ σ'³ = 0`` (Cardano)."""
    p, q = k / (2 * gamma), k * sigma / (2 * gamma)
    root = np.sqrt(q**2 / 4 + p**3 / 27)
    large = np.cbrt(q / 2 + root)
    return float(large - p / (3 * large))


def costs_by_direction(v: Array, s: Array, x: Array) -> Array:
    """(r,) ``k_i = v_iᵀ S⁻¹ XᵀX S⁻ᵀ v_i``, as the paper's loop writes it."""
    k = np.zeros(v.shape[1])
    for i in range(v.shape[1]):
        k[i] = v[:, i].T @ np.linalg.inv(s) @ x.T @ x @ np.linalg.inv(s).T @ v[:, i]
    return k


def costs_with_one_inverse(v: Array, s: Array, x: Array) -> Array:
    """(r,) the same loop with the inverse and XᵀX taken out of it."""
    inverse, second_moment = np.linalg.inv(s), x.T @ x
    k = np.zeros(v.shape[1])
    for i in range(v.shape[1]):
        p = v[:, i] @ inverse
        k[i] = p @ second_moment @ p
    return k
