"""The HTTP application of `scripted_http` behind keys."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service.access.access_control import AccessControl
from service.access.keys import SCOPES, hash_of, new_key
from service.settings import AccessSettings
from tests.service.scripted_http import ScriptedHttp


def access_of_a_key(
    folder: Path, now_s: Callable[[], float] = time.monotonic, **fields: Any
) -> tuple[AccessControl, str]:
    """An access control that knows one key, `team`, which may play; and the key. `fields` are those of its entry."""
    path, key = folder / "keys.json", new_key()
    path.write_text(json.dumps({"keys": [{"name": "team", "sha256": hash_of(key), "scopes": ["rollout"], **fields}]}))
    return AccessControl.of(AccessSettings(keys_file=str(path)), now_s), key


class KeyedHttp:
    """A service with one key of each scope, named after it."""

    def __init__(self, folder: Path, fields: dict[str, dict[str, Any]] | None = None, **service: Any) -> None:
        """Args: `fields` are those of the keys beside name, hash and scope, by name."""
        self.keys: dict[str, str] = {scope: new_key() for scope in SCOPES}
        self.path = folder / "keys.json"
        entries = [
            {"name": scope, "sha256": hash_of(key), "scopes": [scope], **(fields or {}).get(scope, {})}
            for scope, key in self.keys.items()
        ]
        self.path.write_text(json.dumps({"keys": entries}))
        self.service = ScriptedHttp(access=AccessControl.of(AccessSettings(keys_file=str(self.path))), **service)

    def bearer(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[name]}"}
