"""Names the version of the contract in every response. Its reader is `rollout_client/contract_check.py`."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_client.version import CONTRACT_HEADER, CONTRACT_VERSION

HEADER = (CONTRACT_HEADER.encode(), CONTRACT_VERSION.encode())


class ContractVersionMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_version(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), HEADER]
            await send(message)

        await self._app(scope, receive, send_with_version)
