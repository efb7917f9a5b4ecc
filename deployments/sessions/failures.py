"""Every way in which a call of the session store can be refused. The ingress answers with problem documents."""

from deployments.failures import StoreFailure


class SessionFailure(StoreFailure):
    """A call of the session store was not carried out."""


class SessionUnknown(SessionFailure):
    """The session never was, is another caller's, or has expired."""

    status = 404
    name = "session-unknown"
    title = "The session is not known"


class SessionClosed(SessionFailure):
    """The session takes no more calls: it was ended, or its deadline is over."""

    status = 409
    name = "session-closed"
    title = "The session takes no more calls"


class SessionLimitReached(SessionFailure):
    """The session has reached one of its limits, or the service has no room for another one."""

    status = 429
    name = "session-limit-reached"
    title = "A limit of the session is reached; nothing was started"
    retry_after_s = 2


class GenerationUnknown(SessionFailure):
    """The session has generated no message of this id."""

    status = 404
    name = "generation-unknown"
    title = "The session has generated no such message"


class SessionNotJudgeable(SessionFailure):
    """The session has generated nothing, or it was opened without a task that the service has."""

    status = 409
    name = "session-not-judgeable"
    title = "No environment can judge the session"


class JudgementFailed(SessionFailure):
    """The environment refused the conversation, or broke: `value` is the kind of the failure."""

    status = 502
    name = "judgement-failed"
    title = "The environment has not judged the session"


class SessionsNotConfigured(SessionFailure):
    """The config has no `sessions`."""

    status = 501
    name = "sessions-not-configured"
    title = "The service keeps no sessions"


def session_unknown(session_id: str) -> SessionUnknown:
    message = "there is no such session: it has expired, or it is another caller's"
    return SessionUnknown.of("session_id", message, session_id)
