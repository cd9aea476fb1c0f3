"""A group of commands that knows what may be meant by a name that it does not have."""

from difflib import get_close_matches

import click


class SuggestingGroup(click.Group):
    """Commands; of a name that is none of them the error suggests the nearest."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            names = self.list_commands(ctx)
            near = get_close_matches(args[0].lower(), names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}."
            ctx.fail(f"there is no command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)
