"""`esvdfair demo`: a small network, repaired; needs no file."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esvdfair.cli import _options as opt
from esvdfair.cli._terminal import answer, at_work, text_table, wrapped
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.text import summary_table, verdict

if TYPE_CHECKING:
    import pandas as pd

SHARES = (0.4, 0.5)  # of all rows not to train on, and of those not to choose on either


@click.command()
@opt.target_ks_option(default=0.1)
@opt.option("--report", "FILE", "Where the report goes.", default="demo-report.html", show_default=True)
@opt.plot_option("Also draw the distributions before and after")
@opt.force_option
@opt.SEED
@opt.json_option
@click.pass_obj
def demo(
    command: Sequence[str], target_ks: float, report: Path, plot: Path | None, force: bool, seed: int, as_json: bool
) -> int:
    """Repair a small network that predicts wages; needs no file.

    Trains a network on the table `twoyear` (6,763 people; Kane and Rouse 1995) without their sex, repairs it, and
    compares both on people whom neither step has seen. They decide whether --target-ks is met: exit code 1 if it is
    not. Writes a report. Works offline, in less than a minute. Without the extra `data`, which contains the table, the
    people are made up.

    \b
    Examples:
      esvdfair demo
      esvdfair demo --target-ks 0.05 --plot demo.svg
    """
    from sklearn.neural_network import MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from esvdfair.audit import audit_predictions
    from esvdfair.estimator import ESVDFair
    from esvdfair.report import write_report

    written = [report, *([plot] if plot is not None else [])]
    opt.check_free(written, force=force)
    with at_work(3) as work:
        work.step("training a network")
        (X, y, sex), validation, test = _split_wages(seed)
        X_test, y_test, sex_test = test
        network = MLPRegressor(hidden_layer_sizes=(64, 64), early_stopping=True, random_state=seed)
        model = make_pipeline(StandardScaler(), network).fit(X, y)
        work.step("repairing it")
        fair = ESVDFair(model, target_ks=target_ks, random_state=seed)
        fair.fit(X, y, sensitive_features=sex, validation=validation)
        work.step("comparing both")
        unseen = fair.assess(X_test, y_test, sensitive_features=sex_test)
        predictions = [m.predict(X_test) for m in (model, fair)]
        before, after = (audit_predictions(found, sex_test, y_test, seed=seed) for found in predictions)
        if plot is not None:
            _save_densities(plot, predictions, sex_test)
        write_report(
            report, fair, X, y, sensitive_features=sex, test=test,
            model="a network of two hidden layers of 64", data="wages, 6,763 people (Kane and Rouse 1995)",
            summary=unseen, predicts="hourly wage", unit="logarithms of dollars", command=command,
        )  # fmt: skip
    title = f"Log hourly wages of {len(y_test):,} people whom neither training nor repair has seen, predicted"
    answer(
        {
            "target_ks": target_ks, "met": unseen["met"], "rows": len(y_test), "report": report,
            "before": before.to_dict(), "after": after.to_dict(), "summary": fair.summary_, "tested": unseen,
        },
        wrapped(f"{title} by a network that does not know their sex"), text_table(*summary_table(unseen)),
        wrapped(f"Before: {before.verdict()}"), wrapped(f"After: {verdict(unseen)}"),
        wrapped("The repaired network differs in its last layer only; it does not need to know their sex either."),
        f"wrote {', '.join(map(str, written))}", as_json=as_json, written=written,
    )  # fmt: skip
    return 1 if unseen["met"] is False else 0


def _split_wages(seed: int) -> list[tuple[Any, ...]]:
    """People to train on, to choose on, and to judge on: inputs, wages and sex of each."""
    from sklearn.model_selection import train_test_split

    from esvdfair.datasets import load_wages, make_wages

    try:
        wages = load_wages()
    except ImportError as error:
        warnings.warn(f"{error} Until then, these people are made up.", ESVDFairWarning, stacklevel=2)
        wages = make_wages(10_000)
    sex = wages.sensitive_features
    train, rest = train_test_split(wages.X.index, test_size=SHARES[0], random_state=seed, stratify=sex)
    validation, test = train_test_split(rest, test_size=SHARES[1], random_state=seed, stratify=sex[rest])
    return [(wages.X.loc[part], wages.y[part], sex[part].to_frame()) for part in (train, validation, test)]


def _save_densities(path: Path, predictions: list[Any], sex: "pd.DataFrame") -> None:
    """Densities before and after, side by side on common axes."""
    from matplotlib.figure import Figure

    from esvdfair.plots import plot_before_and_after

    figure = Figure(figsize=(8.4, 3.1), layout="constrained")
    axes = plot_before_and_after(*predictions, sensitive_features=sex, axes=figure.subplots(1, 2, sharey=True))
    for ax in axes:
        ax.set_xlabel("predicted log hourly wage")
    opt.save_figure(figure, path, replace=True)
