"""Why a service did not start."""


class ServiceNotStarted(Exception):
    """The service did not start; the message is for the user and says what to change."""
