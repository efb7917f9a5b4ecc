"""The HTTP application of `scripted_http` behind keys."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service.access.access_control import CHECK_PERIOD_S, AccessControl
from service.access.keys import SCOPES, hash_of, new_key
from service.settings import AccessSettings
from tests.service.scripted_http import ScriptedHttp


def access_of_a_key(
    folder: Path, now_s: Callable[[], float] = time.monotonic, **fields: Any
) -> tuple[AccessControl, str]:
    """An access control that knows one key, `team`, which may play; and the key. `fields` are those of its entry."""
    path, key = folder / "keys.json", new_key()
    entry = {"name": "team", "sha256": hash_of(key), "scopes": ["rollout"], **fields}
    path.write_text(json.dumps({"keys": [entry]}))
    return AccessControl.of(AccessSettings(keys_file=str(path)), now_s), key


class KeyedHttp:
    """A service with one key of each scope, named after it."""

    def __init__(self, folder: Path, fields: dict[str, dict[str, Any]] | None = None, **service: Any) -> None:
        """Args: `fields` are those of the keys beside name, hash and scope, by name."""
        self.keys: dict[str, str] = {scope: new_key() for scope in SCOPES}
        self.path = folder / "keys.json"
        self.write({scope: (fields or {}).get(scope, {}) for scope in SCOPES})
        self._now_s = 0.0
        self.access = AccessControl.of(AccessSettings(keys_file=str(self.path)), lambda: self._now_s)
        self.service = ScriptedHttp(access=self.access, **service)

    def write(self, fields: dict[str, dict[str, Any]]) -> None:
        """Makes the keys of these names the valid ones, from the next check of the file on."""
        entries = [
            {"name": name, "sha256": hash_of(self.keys[name]), "scopes": [name], **more}
            for name, more in fields.items()
        ]
        self.path.write_text(json.dumps({"keys": entries}))

    def let_check(self) -> None:
        """The next request reads the file again."""
        self._now_s += CHECK_PERIOD_S

    def bearer(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[name]}"}
