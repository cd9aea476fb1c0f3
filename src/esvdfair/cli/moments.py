"""`esvdfair moments`: what several sites give away for a common repair instead of rows."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from esvdfair.cli._files import check_free, staged
from esvdfair.cli._group import SuggestingGroup
from esvdfair.cli._inputs import Reading, file_bar, load_model
from esvdfair.cli._options import FILE, force_option, json_option, model_and_data, table_options
from esvdfair.cli._output import notes, print_json, progress
from esvdfair.cli._ranks import only_first_rank

if TYPE_CHECKING:
    from esvdfair.federated import SiteMoments

MIN_ROWS = 10  # esvdfair.federated.MIN_ROWS, without importing it for --help

out_option = click.option("-o", "--out", metavar="FILE", required=True, type=FILE, help="Where the moments go.")


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
@model_and_data
@table_options(target="Column with the true value; all sites name it, or none does.")
@click.option(
    "--min-rows",
    default=MIN_ROWS,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="Fewest rows of a group: moments of few people tell about each of them.",
)
@out_option
@force_option
@json_option
def collect(
    model: Path,
    data: Path,
    output: str | None,
    reading: Reading,
    min_rows: int,
    out: Path,
    force: bool,
    as_json: bool,
) -> None:
    """Write the moments of the rows of DATA, and what they say about the model.

    One pass over the rows. A group may be absent here and present at other sites; groups are matched by their values.

    \b
    Example:
      esvdfair moments collect model.onnx people.csv --sensitive sex --target income -o a.moments
    """
    from esvdfair.federated import collect_moments

    check_free([out], force=force, inputs=[model, data])
    with notes(), progress(2) as bar, file_bar() as show:
        bar.set_description("reading")
        rows = reading.table(data, load_model(model, output), min_groups=1, progress=show)
        bar.update()
        bar.set_description("collecting")
        site = collect_moments(str(model), rows, output=output, min_rows=min_rows)
        only_first_rank()
        site = replace(site, sensitive=rows.roles.sensitive, features=tuple(rows.inputs), target=rows.roles.target)
    _write(site, out, f"moments of {site.rows:,} rows of {data} at {model}", as_json=as_json)


@moments.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=FILE)
@out_option
@force_option
@json_option
def merge(files: tuple[Path, ...], out: Path, force: bool, as_json: bool) -> None:
    """Add up moments of several sites.

    Refuses files of different models, layers or columns, some with labels and some without, and rows that come twice.

    \b
    Example:
      esvdfair moments merge a.moments b.moments -o all.moments
    """
    from esvdfair.federated import merge_moments

    check_free([out], force=force, inputs=list(files))
    with notes():
        site = merge_moments(files)
    _write(site, out, f"{len(files)} files merged, {site.rows:,} rows", as_json=as_json)


def _write(site: "SiteMoments", out: Path, title: str, *, as_json: bool) -> None:
    """Write moments to their file, and print what they say."""
    from esvdfair.cli._moments import described, figures_of, show_moments

    with staged(out) as places:
        site.save(places[out])
    if as_json:
        print_json(described(site, out) | {"predictions": figures_of(site)})
        return
    click.echo(title + "\n")
    show_moments(site)
    click.echo(f"\nwrote {out}")


@moments.command()
@click.argument("file", metavar="FILE", type=FILE)
@json_option
def show(file: Path, as_json: bool) -> None:
    """Show what a moments file holds, before it is sent or used.

    \b
    Example:
      esvdfair moments show a.moments
    """
    from esvdfair.cli._moments import described, figures_of, show_moments, small_groups
    from esvdfair.federated import SiteMoments

    site = SiteMoments.load(file)
    warning = small_groups(site)
    if as_json:
        print_json(described(site, file) | {"predictions": figures_of(site), "warning": warning})
    else:
        click.echo(f"{file}: moments of {site.rows:,} rows\n")
        show_moments(site)
    if warning is not None:
        click.echo(f"note: {warning}", err=True)
