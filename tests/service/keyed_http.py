"""The HTTP application of `scripted_http` behind keys."""

import json
from pathlib import Path
from typing import Any

from service.access.access_control import AccessControl
from service.access.keys import SCOPES, hash_of, new_key
from service.settings import AccessSettings
from tests.service.scripted_http import ScriptedHttp

SAMPLE = {"task_name": "math", "messages": [{"role": "user", "content": "What is 1 + 1?"}]}


def access_of_a_key(folder: Path, **fields: Any) -> tuple[AccessControl, str]:
    """An access control that knows one key, `team`, which may play; and the key. `fields` are those of its entry."""
    path, key = folder / "keys.json", new_key()
    entry = {"name": "team", "sha256": hash_of(key), "scopes": ["rollout"], **fields}
    path.write_text(json.dumps({"keys": [entry]}))
    return AccessControl.of(AccessSettings(keys_file=str(path))), key


class KeyedHttp:
    """A service with one key of each scope, named after it."""

    def __init__(self, folder: Path, fields: dict[str, dict[str, Any]] | None = None, **service: Any) -> None:
        """Args: `fields` are those of the keys beside name, hash and scope, by name."""
        self.keys: dict[str, str] = {scope: new_key() for scope in SCOPES}
        self.path = folder / "keys.json"
        self.write({scope: (fields or {}).get(scope, {}) for scope in SCOPES})
        self.access = AccessControl.of(AccessSettings(keys_file=str(self.path)))
        self.service = ScriptedHttp(access=self.access, **service)

    def write(self, fields: dict[str, dict[str, Any]]) -> None:
        """Makes the keys of these names the valid ones."""
        entries = [
            {"name": name, "sha256": hash_of(self.keys[name]), "scopes": [name], **more}
            for name, more in fields.items()
        ]
        self.path.write_text(json.dumps({"keys": entries}))

    def bearer(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[name]}"}
