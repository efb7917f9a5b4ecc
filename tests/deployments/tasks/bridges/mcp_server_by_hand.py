"""An MCP server over standard input and output that speaks the protocol by hand, to do what the official one does not.

Its argument says how `tools/list` is answered; the tools themselves answer with each kind of content, and with what the
protocol does not permit.
"""

import json
import sys
from itertools import count
from typing import Any

RESULTS: dict[str, dict[str, Any]] = {
    "structured": {"content": [], "structuredContent": {"value": 42, "unit": "cm²"}},
    "structured_failure": {"content": [], "structuredContent": {"reason": "no luck"}, "isError": True},
    "text_and_structured": {"content": [{"type": "text", "text": "42 cm"}], "structuredContent": {"value": 42}},
    "resource": {
        "content": [{"type": "resource", "resource": {"uri": "file:///a", "mimeType": "text/plain", "text": "42"}}],
        "structuredContent": {"value": 42},
    },
    "link": {"content": [{"type": "resource_link", "uri": "file:///a.txt", "name": "a.txt"}]},
    "audio": {"content": [{"type": "audio", "data": "AA==", "mimeType": "audio/wav"}, {"type": "text", "text": "42"}]},
    "nothing": {"content": []},
    "blank_text": {
        "content": [{"type": "text", "text": " \n"}, {"type": "image", "data": "AA==", "mimeType": "image/png"}],
        "structuredContent": {"value": 42},
    },
    "huge": {"content": [{"type": "text", "text": "a" * 4_000_000}]},
}
BROKEN: dict[str, Any] = {
    "no_content": {"structuredContent": {"value": 42}},
    "unknown_block": {"content": [{"type": "video", "data": "AA=="}]},
    "broken_failure": {"content": None, "isError": True},
    "against_its_schema": {"content": [], "structuredContent": {"value": "42"}},
    "without_its_schema": {"content": [{"type": "text", "text": "42"}]},
    "with_a_wrong_schema": {"content": [], "structuredContent": {"value": 42}},
}
"""Results that the protocol, or the tool's own output schema, does not permit."""
OUTPUT = {"type": "object", "properties": {"value": {"type": "integer"}}, "required": ["value"]}
OUTPUTS: dict[str, Any] = {
    "against_its_schema": OUTPUT,
    "without_its_schema": OUTPUT,
    "with_a_wrong_schema": {"type": "object", "properties": {"value": {"pattern": "[", "type": "numeral"}}},
}
TOOLS = [
    {"name": name, "inputSchema": {"type": "object"}, **({"outputSchema": OUTPUTS[name]} if name in OUTPUTS else {})}
    for name in [*RESULTS, *BROKEN]
]
pages = count(1)


def tools_page(mode: str, cursor: str | None) -> dict[str, Any]:
    number = next(pages)
    match mode:
        case "paged":
            place = int(cursor or 0)
            more = {"nextCursor": str(place + 1)} if place + 1 < len(TOOLS) else {}
            return {"tools": TOOLS[place : place + 1], **more}
        case "same_cursor":
            return {"tools": TOOLS, "nextCursor": "always"}
        case "endless_pages":
            return {"tools": [], "nextCursor": str(number)}
        case "no_list":
            return {"tools": None}
        case "late" if cursor is not None:
            raise ValueError("the second page is gone")
        case "late":
            return {"tools": TOOLS[:1], "nextCursor": "2"}
    return {"tools": TOOLS}


def answer(mode: str, method: str, parameters: dict[str, Any]) -> dict[str, Any] | None:
    if method == "initialize":
        version = parameters.get("protocolVersion", "2025-06-18")
        server = {"name": "by hand", "version": "1"}
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":
        return None if mode == "silent" else tools_page(mode, parameters.get("cursor"))
    if method == "tools/call":
        result: dict[str, Any] = {**RESULTS, **BROKEN}[parameters["name"]]
        return result
    if method == "ping":
        return {}
    raise LookupError(method)


def main(mode: str) -> None:
    for line in filter(str.strip, sys.stdin):
        message = json.loads(line)
        if "id" not in message or "method" not in message:
            continue
        try:
            result = answer(mode, message["method"], message.get("params") or {})
            reply: dict[str, Any] = {"result": result}
        except LookupError as error:
            reply = {"error": {"code": -32601, "message": f"Method not found: {error}"}}
        except ValueError as error:
            reply = {"error": {"code": -32603, "message": str(error)}}
        if reply.get("result", True) is not None:
            sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], **reply}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
