"""The warning class of the library, so that users can filter or escalate its warnings alone."""


class ESVDFairWarning(UserWarning):
    """Something the user should know about the repair: a target not met, a fallback taken."""
