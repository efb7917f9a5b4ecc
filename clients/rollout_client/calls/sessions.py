"""`OpenedSession`: what a program needs to know of a session. No I/O."""

from rollout_client.contract.sessions import SessionInfo


class OpenedSession:
    """The addresses and the key of a session. They raise `ValueError` before it is open."""

    _info: SessionInfo | None = None

    @property
    def id(self) -> str:
        return self._opened.id

    @property
    def base_url(self) -> str:
        """For OpenAI's clients."""
        return f"{self._opened.base_url}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """For Anthropic's clients, which put `/v1` behind it themselves."""
        return self._opened.base_url

    @property
    def api_key(self) -> str:
        """The key of this session alone."""
        key = self._opened.api_key
        assert key is not None
        return key

    @property
    def _opened(self) -> SessionInfo:
        if self._info is None:
            raise ValueError("The session is not open: use it in a with statement, `async with` of the async client.")
        return self._info
