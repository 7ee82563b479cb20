"""What ci/gpu is made of."""


class Trouble(Exception):
    """Ends ci/gpu with exit code 2: wrong usage, or a machine that cannot run this."""
