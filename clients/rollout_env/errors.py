"""What an environment raises, and what is raised about an environment."""


class SampleRejected(Exception):
    """The sample's `extra_env_info` is no state of this task.

    An environment raises it when `extra_env_info` has the right fields but cannot be played, such as a game that is
    over. The service reports the sample as failed, with this message, and does not try it again.
    """


class OutcomeInvalid(Exception):
    """A step returned something that is no valid `StepOutcome`. The message names the field and the problem."""
