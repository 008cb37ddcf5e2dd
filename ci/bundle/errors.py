"""The one error that a user of the bundle commands is meant to see."""


class BundleError(Exception):
    """Something the user can put right; its text is one line that says how."""
