"""What commands say about moments, and the repair that starts from them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from esvdfair.cli._files import sha256_of
from esvdfair.cli._inputs import Reading, file_bar, load_model
from esvdfair.cli._output import (
    JUDGED_ON,
    label_text,
    notes,
    number,
    print_json,
    printable,
    progress,
    some_names,
    table,
)
from esvdfair.cli._ranks import only_first_rank
from esvdfair.cli._record import Written, write_repaired
from esvdfair.cli.repair import before_and_after, verdict
from esvdfair.estimator import ESVDFair
from esvdfair.federated import MIN_ROWS, SiteMoments, repair_from_moments
from esvdfair.tables import Progress, TableBatches

UNKNOWN_KS = (
    "KS distance: unknown. Moments tell means and variances, not whole distributions; --validation FILE gives rows to "
    "measure it on."
)


def described(site: SiteMoments, path: Path) -> dict[str, Any]:
    """What a moments file holds but the numbers themselves, for JSON."""
    return {
        "path": str(path),
        "sha256": sha256_of(path),
        "model": site.model,
        "layer": site.layer.name,
        "width": len(site.layer.weight),
        "labelled": site.labelled,
        "sensitive": site.sensitive,
        "target": site.target,
        "features": site.features,
        "rows": site.rows,
        "group_sizes": dict(zip(site.moments.labels, site.moments.rows.tolist(), strict=True)),
        "sites": [asdict(item) for item in site.sites],
    }


def figures_of(site: SiteMoments) -> dict[str, Any]:
    """What the moments tell about the model's predictions, for JSON."""
    found = site.figures()
    several = len(site.moments.labels) > 1
    columns = {
        "mean": found.means,
        "std": found.variances**0.5,
        "mse": found.group_mse,
        "r2": found.group_r2,
    }
    by_group = {
        label: {name: None if values is None else float(values[g]) for name, values in columns.items()}
        for g, label in enumerate(site.moments.labels)
    }
    return {
        "before_head": None if site.layer.head.is_affine else site.layer.head.kind,
        "mean_gap": found.mean_gap if several else None,
        "variance_gap": found.variance_gap if several else None,
        "mse": found.mse,
        "r2": found.r2,
        "groups": by_group,
    }


def small_groups(site: SiteMoments) -> str | None:
    """A warning about groups so small that their moments tell about single people; None when there are none."""
    found = [
        f"{label_text(label)} {rows}" + (f" in {part.name}" if part.name else "")
        for part in site.sites
        for label, rows in zip(part.labels, part.rows, strict=True)
        if rows < MIN_ROWS
    ]
    if not found:
        return None
    return (
        f"few rows in a group: {', '.join(found)}. Moments of so few people tell much about each of them; those of one "
        "row are that row. Do not send them on."
    )


def show_moments(site: SiteMoments) -> None:
    """Print what an auditor would look at before the file is sent."""
    found = figures_of(site)
    what = "mean prediction" if found["before_head"] is None else f"mean before the {found['before_head']}"
    errors = ["MSE", "R²"] if found["mse"] is not None else []
    lines = []
    for label, rows in zip(site.moments.labels, site.moments.rows.tolist(), strict=True):
        mine = found["groups"][label]
        line = [label_text(label), f"{rows:,}", number(mine["mean"]), number(mine["std"])]
        lines.append(line + [number(mine[key]) for key in ("mse", "r2") if errors])
    attribute = ", ".join(site.sensitive) if site.sensitive else "group"
    click.echo(table([attribute, "rows", what, "std", *errors], lines) + "\n")
    facts = [
        ["moments of", f"{len(site.layer.weight)} inputs of layer {site.layer.name}" + _label(site)],
        ["SHA-256 of the model", site.model],
        ["inputs of the model", "not named" if site.features is None else some_names(site.features, 8)],
    ]
    if len(site.moments.labels) > 1:
        facts.append(["gap of means", number(found["mean_gap"])])
        facts.append(["gap of variances", number(found["variance_gap"])])
    facts += [
        [f"site {place}", f"{part.name or 'not named'}, {sum(part.rows):,} rows, SHA-256 {part.fingerprint[:12]}…"]
        for place, part in enumerate(site.sites, start=1)
        if len(site.sites) > 1
    ]
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        click.echo(f"{name.ljust(width)}  {printable(value, 100)}")


def _label(site: SiteMoments) -> str:
    if not site.labelled:
        return ", no label"
    return f" and the label {site.target}" if site.target else " and the label"


# --- repair --moments ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What `esvdfair repair --moments` was asked for."""

    model: Path
    data: Path | None
    output: str | None
    moments: Path
    reading: Reading
    target_ks: float | None
    method: str
    layer: int | str | None
    validation: Path | None
    seed: int

    def check(self, report: Path | None) -> None:
        """Refuse what moments cannot do, in the words of the command line."""
        if self.data is not None:
            raise click.UsageError(
                f"got both {str(self.data)!r} and --moments; the rows of a table would be counted beside the moments, "
                "perhaps twice. Give one of them, and rows to choose and judge on as --validation FILE."
            )
        if self.method != "parity":
            raise click.UsageError(
                f"--method {self.method} needs rows: transport compares whole distributions, exact and paper run the "
                "rows through an edited layer. From moments alone, --method parity equalises means and variances."
            )
        if self.layer is not None:
            raise click.UsageError("--layer belongs to --method exact and paper, which --moments cannot serve.")
        if self.validation is None and self.target_ks is not None:
            raise click.UsageError(
                "--target-ks needs --validation FILE: a KS distance cannot be known from moments. Without a target, "
                "means and variances become equal."
            )
        if self.validation is None and report is not None:
            raise click.UsageError("--report needs --validation FILE: it shows predictions for rows.")

    def read_validation(self, site: SiteMoments, show: Progress) -> TableBatches | None:
        """The rows that judge; columns that were not named are those of the moments."""
        if self.validation is None:
            return None
        roles = self.reading.roles
        roles = replace(
            roles, sensitive=roles.sensitive or site.sensitive or (), features=roles.features or site.features
        )
        model = load_model(self.model, self.output)
        return replace(self.reading, roles=roles).table(self.validation, model, progress=show)


def repair_with_moments(request: Request, written: Written, *, as_json: bool, command: Sequence[str] | None) -> int:
    """Repair from a moments file, write the model and its record, print what was reached; the exit code."""
    request.check(written.report)
    with notes(), progress(3) as bar, file_bar() as show:
        bar.set_description("reading")
        site = SiteMoments.load(request.moments)
        judging = request.read_validation(site, show)
        bar.update()
        bar.set_description("repairing")
        fair = repair_from_moments(
            str(request.model),
            site,
            validation=None if judging is None else (judging, None, None),
            target_ks=request.target_ks,
            output=request.output,
            random_state=request.seed,
        )
        only_first_rank()
        bar.update()
        bar.set_description("writing")
        about = described(site, request.moments)
        record = write_repaired(fair, None, judging, written, command=command, moments=about)
    if as_json:
        print_json(record)
    else:
        _show_repair(fair, site, request, judging)
        click.echo(f"\nwrote {', '.join(map(str, written.paths))}")
    return 1 if fair.summary_["met"] is False else 0


def _show_repair(fair: ESVDFair, site: SiteMoments, request: Request, judging: TableBatches | None) -> None:
    sites = f"{len(site.sites)} sites" if len(site.sites) > 1 else "1 site"
    click.echo(f"{request.model} repaired by parity from moments of {site.rows:,} rows at {sites}", nl=False)
    if judging is None:
        click.echo("\n\n" + _known(fair.summary_, labelled=site.labelled) + "\n")
        if fair.summary_["before_head"]:
            kind = site.layer.head.kind
            click.echo(f"Gaps are those before the {kind} at the end of the model; errors after it are unknown.")
        click.echo(click.wrap_text(UNKNOWN_KS, width=100))
        return
    click.echo(f"; judged on {fair.summary_['rows']:,} rows, {JUDGED_ON['validation']}\n")
    click.echo(before_and_after(fair.summary_, labelled=judging.roles.target is not None) + "\n")
    click.echo(click.wrap_text(verdict(fair.summary_), width=100))


def _known(summary: Mapping[str, Any], *, labelled: bool) -> str:
    """Before and after, of what moments tell."""
    keys = [("gap of means", "mean_gap"), ("gap of variances", "variance_gap")]
    if summary["mse_after"] is not None:
        keys.append((f"mean squared {'error' if labelled else 'change'}", "mse"))
    if summary["r2_after"] is not None:
        keys.append(("R²", "r2"))
    lines = []
    for name, key in keys:
        lines.append([name, *(number(summary[f"{key}_{when}"]) for when in ("before", "after"))])
        before, after = (summary.get(f"group_{key}_{when}") for when in ("before", "after"))
        if before is not None and after is not None:
            lines += [[f"  of {label_text(label)}", number(before[label]), number(after[label])] for label in before]
    return table(["", "before", "after"], lines)
