"""What an environment raises, and what is raised about an environment."""


class SampleRejected(Exception):
    """The sample's `extra_env_info` is no state of this task.

    An environment raises it when `extra_env_info` has the right fields but cannot be played, such as a game that is
    over. The service reports the sample as failed, with this message, and does not try it again.
    """


class TemporaryFailure(Exception):
    """Nothing is wrong with the sample: something that the step needs cannot be had just now.

    An environment raises it for a server that does not answer or a connection that broke. The service makes the step
    again, as often as the request's `retries` allow, and reports the sample as failed, but retryable, after that.
    """


class OutcomeInvalid(Exception):
    """A step returned something that is no valid `StepOutcome`. The message names the field and the problem."""
