"""`esvdfair moments`: what several sites give away for a common repair instead of rows."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esvdfair.cli import SuggestingGroup
from esvdfair.cli import _shared as cli
from esvdfair.files import sha256_of, whole_files
from esvdfair.text import distinct_names, label_text, number, printable, some_names

if TYPE_CHECKING:
    from esvdfair.core.checks import Label
    from esvdfair.federated import MaskedMoments, SiteMoments

MIN_ROWS = 10  # esvdfair.federated.MIN_ROWS, without importing it for --help

out_option = cli.option("-o --out", "FILE", "Where the moments go.", required=True)


@click.group(cls=SuggestingGroup, invoke_without_command=True)
@click.pass_context
def moments(ctx: click.Context) -> None:
    """Collect group moments at several sites, merge them, and repair a model without their rows.

    Each site collects and sends one small file: for each group the number of rows, and means and covariances of the
    inputs of the model's last layer (and of the label). No row leaves a site. All commands take --json.

    \b
    Example:
      esvdfair moments collect model.onnx people.csv --sensitive sex --target income -o a.moments
      esvdfair moments show a.moments
      esvdfair moments merge a.moments b.moments -o all.moments
      esvdfair repair model.onnx --moments all.moments --method parity -o fair.onnx
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@moments.command()
@cli.model_and_data
@cli.table_options(target="Column with the true value; all sites name it, or none does.")
@cli.option(
    "--min-rows",
    "N",
    "Fewest rows of a group, of a unit of the last layer in which it is active, and for each unit.",
    default=MIN_ROWS,
    show_default=True,
)
@cli.flag("--unsafe", "Tell of all units and all rows. Who holds the file can then read single people's rows from it.")
@cli.option("--epsilon", "E", "Noise: differentially private for one person more or less.", type=float)
@cli.option("--delta", "D", "With --epsilon.", type=float, default=1e-6, show_default=True)
@cli.option("--public", "FILE", "With --epsilon: a table of rows that need no protection.")
@cli.option(
    "--mask-with",
    "KEY",
    "Secure aggregation: a private key of `esvdfair moments keygen`, which serves once and is deleted.",
    type=cli.FILE,
)
@cli.option("--peer peers", "FILE", "Public key of another site; one each.", multiple=True)
@cli.option(
    "--group groups",
    "VALUE",
    "With --mask-with: each group that any site has, the same at all sites. By default those of DATA.",
    multiple=True,
)
@out_option
@cli.force_option
@cli.json_option
def collect(
    model: Path,
    data: Path,
    output: str | None,
    reading: cli.Reading,
    public: Path | None,
    mask_with: Path | None,
    peers: tuple[Path, ...],
    groups: tuple[str, ...],
    out: Path,
    force: bool,
    as_json: bool,
    **protection: Any,
) -> None:
    """Write the moments of the rows of DATA, and what they say about the model.

    One pass over the rows. A group may be absent here and present at other sites; groups are matched by their values.
    Units that few people have are left out, and people who would stand alone are withheld; see docs/federated.md.

    \b
    Example:
      esvdfair moments collect model.onnx people.csv --sensitive sex --target income -o a.moments
    """
    from esvdfair.federated import collect_moments, mask_moments

    if mask_with is None and (peers or groups):
        raise click.UsageError("--peer and --group belong to --mask-with KEY.")
    adapter = cli.load_model(model, output)
    cli.check_free([out], force=force, inputs=[*cli.model_files(model), data, public, mask_with, *peers])
    with cli.at_work(2) as work:
        work.step("reading")
        rows = reading.table(data, adapter, min_groups=1, progress=work.read)
        work.step("collecting")
        protection["public"] = None if public is None else reading.table(public, adapter, min_groups=1)
        protection["sharing"] = 1 if protection["epsilon"] is None else 1 + len(peers)
        site = collect_moments(str(model), rows, output=output, **protection)
        cli.only_first_rank()
        sensitive, target, control = rows.roles.sensitive, rows.roles.target, rows.roles.control or None
        site = replace(site, sensitive=sensitive, features=tuple(rows.inputs), target=target, control=control)
        masked = None
        if mask_with is not None:
            agreed = [_group(text, site) for text in groups] or None
            masked = mask_moments(site, mask_with, peers, groups=agreed)
    title = f"moments of {site.rows:,} rows of {data} at {model}"
    _write(site, masked or site, out, title, replace=force, as_json=as_json)
    if mask_with is not None:
        mask_with.unlink()
        click.echo(f"masked for {len(peers)} other sites; the key {mask_with} has served and is deleted", err=True)


def _group(text: str, site: "SiteMoments") -> "Label":
    """A group as the table has it, from its text; one that is not here is of the type of the others."""
    known = {label_text(label): label for label in site.moments.labels}
    whole = text.isdigit() and all(isinstance(label, int) for label in known.values())
    return known.get(text, int(text) if whole else text)


@moments.command()
@cli.option("-o --out", "KEY", "Private key; the public one is KEY.pub.", required=True, type=cli.FILE)
@cli.json_option
def keygen(out: Path, as_json: bool) -> None:
    """Make a key for one collection under masks; its public half goes to all other sites.

    \b
    Example:
      esvdfair moments keygen -o north.key
    """
    from esvdfair.federated import make_key

    public = Path(f"{out}.pub")
    cli.check_free([out, public], force=False, inputs=[])
    make_key(out)
    if as_json:
        cli.print_json({"private": str(out), "public": str(public)})
    else:
        click.echo(f"wrote {out}, which stays here, and {public}, which the other sites need")


@moments.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=cli.FILE)
@out_option
@cli.force_option
@cli.json_option
def merge(files: tuple[Path, ...], out: Path, force: bool, as_json: bool) -> None:
    """Add up moments of several sites.

    Refuses files of different models, layers or columns, some with labels and some without, and rows that come twice.

    \b
    Example:
      esvdfair moments merge a.moments b.moments -o all.moments
    """
    from esvdfair.federated import merge_moments

    cli.check_free([out], force=force, inputs=list(files))
    with cli.notes():
        site = merge_moments(files)
    _write(site, site, out, f"{len(files)} files merged, {site.rows:,} rows", replace=force, as_json=as_json)


@moments.command()
@click.argument("file", metavar="FILE", type=cli.FILE)
@cli.json_option
def show(file: Path, as_json: bool) -> None:
    """Show what a moments file holds, before it is sent or used.

    \b
    Example:
      esvdfair moments show a.moments
    """
    from esvdfair.federated import SiteMoments

    site = SiteMoments.load(file)
    warning = _exposed(site)
    if as_json:
        cli.print_json(described(site, file) | {"predictions": _figures_of(site), "warning": warning})
    else:
        click.echo(f"{file}: moments of {site.rows:,} rows\n")
        _show_moments(site)
    if warning is not None:
        click.echo(f"note: {warning}", err=True)


def _write(
    site: "SiteMoments", saved: "SiteMoments | MaskedMoments", out: Path, title: str, *, replace: bool, as_json: bool
) -> None:
    """Write moments to their file, perhaps masked, and print what they say."""
    with whole_files(out, replace=replace) as places:
        saved.save(places[out])
    with cli.after_writing([out]):
        if as_json:
            cli.print_json(described(site, out) | {"predictions": _figures_of(site)})
            return
        click.echo(title + "\n")
        _show_moments(site)
        click.echo(f"\nwrote {out}")


def described(site: "SiteMoments", path: Path) -> dict[str, Any]:
    """What a moments file holds but the numbers themselves, for JSON."""
    sizes = dict(zip(site.moments.labels, site.moments.rows.tolist(), strict=True))
    about = site.about() | {"layer": site.layer.name}
    return {"path": str(path), "sha256": sha256_of(path), **about, "rows": site.rows, "group_sizes": sizes}


def _figures_of(site: "SiteMoments") -> dict[str, Any]:
    """What the moments tell about the model's predictions, for JSON."""
    found, labels = site.figures(), site.compared.labels
    several = len(labels) > 1
    columns = {"mean": found.means, "std": found.variances**0.5, "mse": found.group_mse, "r2": found.group_r2}
    by_group = {
        label: {name: None if values is None else float(values[g]) for name, values in columns.items()}
        for g, label in enumerate(labels)
    }
    return {
        "before_head": None if site.head.is_affine else site.head.kind,
        "mean_gap": found.mean_gap if several else None,
        "variance_gap": found.variance_gap if several else None,
        "mse": found.mse,
        "r2": found.r2,
        "groups": by_group,
    }


def _exposed(site: "SiteMoments") -> str | None:
    """A warning about people who can be read from the moments; None when the attack finds none."""
    from esvdfair.federated.guard import read_alone

    few = [label_text(k) for k, rows in zip(site.moments.labels, site.moments.rows, strict=True) if rows < MIN_ROWS]
    read = sum(map(len, read_alone(site.moments).values()))
    if not few and not read:
        return None
    found = [f"the rows of {read} people can be read from it"] * bool(read)
    found += [f"few rows in a group ({', '.join(few)}) tell much about each of them"] * bool(few)
    return f"do not send this file on: {'; '.join(found)}. Collect it again without --unsafe."


def _show_moments(site: "SiteMoments") -> None:
    """Print what an auditor would look at before the file is sent."""
    found = _figures_of(site)
    what = "mean prediction" if found["before_head"] is None else f"mean before the {found['before_head']}"
    errors = ["MSE", "R²"] if found["mse"] is not None else []
    lines = []
    names = distinct_names(site.compared.labels)
    for name, rows, mine in zip(names, site.compared.rows.tolist(), found["groups"].values(), strict=True):
        line = [name, f"{rows:,}", number(mine["mean"]), number(mine["std"])]
        lines.append(line + [number(mine[key]) for key in ("mse", "r2") if errors])
    attribute = ", ".join(site.sensitive) if site.sensitive else "group"
    click.echo(cli.table([attribute, "rows", what, "std", *errors], lines) + "\n")
    label = ", no label"
    if site.labelled:
        label = " and the label" + (f" {site.target}" if site.target else "")
    facts = [
        ["moments of", f"{site.layer.weight.shape[1]} inputs of layer {site.layer.name}{label}"],
        ["SHA-256 of the model", site.model],
        ["inputs of the model", "not named" if site.features is None else some_names(site.features, 8)],
    ]
    if site.group_parts:
        facts.append(["adjusted for", ", ".join(site.control or ["strata"]) + f", {len(site.moments.labels)} cells"])
    withheld = sum(part.withheld for part in site.sites)
    if site.left_out or withheld:
        facts.append(
            ["left out", f"{len(site.left_out)} units that few people have, {withheld:,} people who stand alone"]
        )
    apart = [part.apart for part in site.sites if part.apart is not None]
    if apart:
        facts.append(["told of together", f"covariances of the groups beyond {min(apart)} units, for want of rows"])
    for noise in dict.fromkeys(part.noise for part in site.sites if part.noise):
        facts.append(["noise", f"epsilon {noise.epsilon:g}, delta {noise.delta:g}, along {noise.axes} directions"])
    if len(names) > 1:
        facts.append(["gap of means", number(found["mean_gap"])])
        facts.append(["gap of variances", number(found["variance_gap"])])
    for place, part in enumerate(site.sites if len(site.sites) > 1 else (), start=1):
        size = "masked: its rows are not told"
        if part.rows:
            size = f"{sum(part.rows):,} rows, SHA-256 {part.fingerprint[:12]}…"
        facts.append([f"site {place}", f"{part.name or 'not named'}, {size}"])
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        click.echo(f"{name.ljust(width)}  {printable(value, 100)}")
