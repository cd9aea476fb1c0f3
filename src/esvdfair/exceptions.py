"""The package's error and warning. Parameters in their messages are in backticks: `target_ks=0.1`, `validation`."""


class InputError(ValueError):
    """What was passed cannot be used; the message says why, and what to do."""


class ESVDFairWarning(UserWarning):
    """Something to know about the repair, such as a target that is not met."""
