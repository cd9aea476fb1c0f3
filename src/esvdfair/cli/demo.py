"""Commands that need no file. `esvdfair demo`: a small network, repaired. `esvdfair doctor`: what is installed here."""

import os
import platform
import re
import warnings
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esvdfair.cli import _shared as cli
from esvdfair.exceptions import ESVDFairWarning
from esvdfair.files import version_of
from esvdfair.text import interval, number, share, verdict

if TYPE_CHECKING:
    import pandas as pd

    from esvdfair.audit import Audit

NAMES = ("As trained", "Repaired")
SHARES = (0.4, 0.5)  # of all rows not to train on, and of those not to choose on either


@click.command()
@cli.target_ks_option(default=0.1)
@cli.option("--report", "FILE", "Where the report goes.", default="demo-report.html", show_default=True)
@cli.option("--plot", "FILE", "Also draw before and after: .png, .svg or .pdf.")
@cli.force_option
@cli.seed_option
@cli.json_option
@click.pass_context
def demo(
    ctx: click.Context, target_ks: float, report: Path, plot: Path | None, force: bool, seed: int, as_json: bool
) -> int:
    """Repair a small network that predicts wages; needs no file.

    Trains on the table `twoyear` (6,763 people; Kane and Rouse 1995) without their sex, repairs the network, and prints
    how women and men fare before and after, on people whom neither step has seen; the report shows more. Those people
    decide whether --target-ks is met: exit code 1 if it is not. Takes well under a minute. Without the extra `data`,
    which holds the table, the people are made up.

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

    cli.check_plot(plot)
    written = [report, *([plot] if plot is not None else [])]
    cli.check_free(written, force=force, inputs=[])
    with cli.at_work(3) as work:
        work.step("training a network")
        (X, y, sex), validation, test = _people(seed)
        X_test, y_test, sex_test = test
        network = MLPRegressor(hidden_layer_sizes=(64, 64), early_stopping=True, random_state=seed)
        model = make_pipeline(StandardScaler(), network).fit(X, y)
        work.step("repairing it")
        fair = ESVDFair(model, target_ks=target_ks, random_state=seed)
        fair.fit(X, y, sensitive_features=sex, validation=validation)
        work.step("judging both")
        unseen = fair.assess(X_test, y_test, sensitive_features=sex_test)
        predictions = [m.predict(X_test) for m in (model, fair)]
        before, after = (audit_predictions(found, sex_test, y_test, seed=seed) for found in predictions)
        if plot is not None:
            _draw(plot, predictions, sex_test)
        write_report(
            report, fair, X, y, sensitive_features=sex, test=test,
            model="a network of two hidden layers of 64", data="wages of `twoyear` (Kane and Rouse 1995)",
            summary=unseen, predicts="hourly wage", unit="logarithms of dollars", command=ctx.obj,
        )  # fmt: skip
    with cli.after_writing(written):
        if as_json:
            cli.print_json({
                "target_ks": target_ks, "met": unseen["met"], "rows": len(y_test), "report": report,
                "before": before.to_dict(), "after": after.to_dict(), "summary": fair.summary_, "tested": unseen,
            })  # fmt: skip
        else:
            click.echo(
                f"Log hourly wages of {len(y_test):,} people whom neither training nor repair has seen, predicted"
            )
            click.echo("by a network that does not know their sex\n")
            click.echo(_table(before, after) + "\n")
            click.echo(cli.wrapped(f"Before: {before.verdict()}"))
            click.echo(cli.wrapped(f"After:  {after.verdict()}"))
            click.echo(cli.wrapped(f"Repair: {verdict(unseen)}"))
            click.echo(
                "\nThe repaired network is the same network with another last layer; it, too, never asks for the sex."
            )
            click.echo(f"wrote {', '.join(map(str, written))}")
    return 1 if unseen["met"] is False else 0


def _people(seed: int) -> list[tuple[Any, ...]]:
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


def _table(before: "Audit", after: "Audit") -> str:
    lines = [
        ["KS distance", share(before.between.ks), share(after.between.ks), interval(after.between.ks_interval, share)],
        ["mean squared error", number(before.mse), number(after.mse), ""],
    ]
    for old, new in zip(before.groups, after.groups, strict=True):
        lines.append([f"  of {old.group}", number(old.mse), number(new.mse), interval(new.mse_interval)])
    lines.append(["R²", share(before.r2), share(after.r2), ""])
    for old, new in zip(before.groups, after.groups, strict=True):
        lines.append(
            [f"mean prediction of {old.group}", number(old.mean), number(new.mean), interval(new.mean_interval)]
        )
    return cli.text_table(["", "before", "after", "95% interval, after"], lines)


def _draw(path: Path, predictions: list[Any], sex: "pd.DataFrame") -> None:
    """Densities before and after, side by side on common axes."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    from esvdfair.plots import plot_densities

    figure = Figure(figsize=(8.4, 3.1), layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12, wspace=0.04))
    for ax, name, found in zip(figure.subplots(1, 2, sharex=True, sharey=True), NAMES, predictions, strict=True):
        plot_densities(found, sensitive_features=sex, ax=ax)
        ax.set_title(f"{name}: {ax.get_title(loc='left')}", loc="left", pad=14)
        ax.set_xlabel("predicted log hourly wage")
        ax.locator_params(nbins=5)
    cli.save_figure(figure, path, replace=True)


# --- doctor --------------------------------------------------------------------------------------------------------

FOR_USERS = ("torch", "onnx", "plots", "data", "peers")
"""Extras that a user may want; the others are for developers."""
VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@click.command()
@cli.json_option
def doctor(as_json: bool) -> None:
    """Print versions, threads and extras.

    Nothing is sent anywhere; paste it into an issue.

    \b
    Example:
      esvdfair doctor
    """
    found: dict[str, Any] = {
        "esvdfair": version_of("esvdfair") or "not installed, run from its source",
        "python": f"{platform.python_version()} on {platform.platform()}",
        **_packages(),
        "threads": _threads(),
    }
    if as_json:
        cli.print_json(found)
        return
    for name, value in found.items():
        lines = [f"{key} {item}" for key, item in value.items()] if isinstance(value, dict) else [value]
        click.echo(f"{name:10}" + f"\n{'':10}".join(lines))


def _packages() -> dict[str, dict[str, str]]:
    """Versions of what is needed always, then of what each extra needs."""
    try:
        needed = requires("esvdfair") or []
    except PackageNotFoundError:
        needed = []
    found: dict[str, dict[str, str]] = {name: {} for name in ("needs", *FOR_USERS)}
    for line in needed:
        package = re.match(r"[\w.-]+", line)
        extra = re.search(r"extra == ['\"]([\w-]+)", line)
        name = extra[1] if extra else "needs"
        if package and name in found:
            missing = "is not installed" + (f": pip install 'esvdfair[{name}]'" if extra else "")
            found[name][package[0]] = version_of(package[0]) or missing
    return found


def _threads() -> dict[str, Any]:
    from threadpoolctl import threadpool_info

    pools = {f"{pool['internal_api']} {pool['version']}": f"uses {pool['num_threads']}" for pool in threadpool_info()}
    given = {name: f"is {os.environ[name]}" for name in VARIABLES if name in os.environ}
    return (
        {"cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()} | pools | given
    )
