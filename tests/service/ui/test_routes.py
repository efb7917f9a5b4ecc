"""`GET /ui`: the files of the page, which need no key and hold no data."""

from pathlib import Path
from posixpath import join, normpath
from re import DOTALL, MULTILINE, findall, sub

import pytest

from service.access.access_control import AccessControl
from service.settings import AccessSettings
from service.ui.routes import PAGE
from tests.service.keyed_http import KeyedHttp
from tests.service.scripted_http import ScriptedHttp

FILES = {path.relative_to(PAGE).as_posix(): path for path in PAGE.rglob("*") if path.is_file()}
MODULES = [path for path in FILES if path.endswith(".js")]


@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize(
    ("path", "media_type"),
    [
        ("", "text/html; charset=utf-8"),
        ("index.html", "text/html; charset=utf-8"),
        ("app/main.js", "text/javascript; charset=utf-8"),
        ("styles/base.css", "text/css; charset=utf-8"),
        ("icon.svg", "image/svg+xml"),
        ("vendor/hyparquet/LICENSE", "application/octet-stream"),
    ],
)
def test_a_file_of_the_page_has_its_type_under_both_prefixes(prefix: str, path: str, media_type: str) -> None:
    response = ScriptedHttp().request("GET", f"{prefix}/ui/{path}")
    assert (response.status_code, response.headers["content-type"]) == (200, media_type)
    assert response.content == (PAGE / (path or "index.html")).read_bytes()


def test_the_page_may_run_its_own_files_only() -> None:
    response = ScriptedHttp().request("GET", "/ui/")
    policy = response.headers["content-security-policy"].split("; ")
    assert "default-src 'none'" in policy
    assert {part for part in policy if part.startswith(("script-src", "style-src", "connect-src", "worker-src"))} == {
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "worker-src 'self'",
    }
    assert {part for part in policy if part.startswith("img-src")} == {"img-src 'self' blob:"}
    assert {"frame-ancestors 'none'", "base-uri 'none'", "require-trusted-types-for 'script'"} <= set(policy)
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("module", MODULES)
def test_what_a_module_imports_is_a_file_of_the_page(module: str) -> None:
    code = sub(r"/\*.*?\*/", "", FILES[module].read_text(), flags=DOTALL)
    imported = findall(r"""(?:\bfrom |^import |\bimport\()["']([^"']+)["']""", code, flags=MULTILINE)
    folder = module.rpartition("/")[0]
    assert [address for address in imported if normpath(join(folder, address)) not in FILES] == []


def test_the_address_without_a_slash_leads_to_the_page() -> None:
    response = ScriptedHttp().request("GET", "/ui?from=mail")
    assert (response.status_code, response.headers["location"]) == (307, "ui/?from=mail")


def test_a_file_is_asked_for_again_and_sent_only_when_it_has_changed() -> None:
    service = ScriptedHttp()
    first = service.request("GET", "/ui/app/main.js")
    assert first.headers["cache-control"] == "no-cache"
    again = service.request("GET", "/ui/app/main.js", headers={"if-none-match": f'"other", W/{first.headers["etag"]}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    assert service.request("GET", "/ui/", headers={"if-none-match": first.headers["etag"]}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "no-such.js",
        "app",
        "../files.py",
        "%2e%2e/files.py",
        "app/../../files.py",
        "/etc/passwd",
        "app%2f..%2f..%2f__init__.py",
        "index.html%00",
    ],
)
def test_what_is_no_file_of_the_page_is_not_found(path: str) -> None:
    response = ScriptedHttp().request("GET", f"/ui/{path}")
    assert (response.status_code, response.headers["content-type"]) == (404, "application/problem+json")


def test_the_files_need_no_key_where_the_service_asks_for_one(tmp_path: Path) -> None:
    keyed = KeyedHttp(tmp_path)
    assert keyed.service.request("GET", "/policy").status_code == 401
    assert {keyed.service.request("GET", f"/ui/{path}").status_code for path in ("", "app/main.js")} == {200}


def test_a_name_that_only_resolves_to_loopback_gets_no_page() -> None:
    service = ScriptedHttp(access=AccessControl.of(AccessSettings()))
    assert service.request("GET", "/ui/", headers={"host": "evil.example"}).status_code == 403


def test_every_vendored_library_has_its_licence() -> None:
    folders = {path.split("/")[1] for path in FILES if path.startswith("vendor/") and path.count("/") > 1}
    assert folders == {"fzstd", "hyparquet"}
    assert {f"vendor/{folder}/LICENSE" for folder in folders} <= FILES.keys()
