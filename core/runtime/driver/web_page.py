"""The web page: the package's static files, and the checks that keep other sites out.

The files hold no data. All data comes from `/v1/…`, whose requests carry the token in a header, and
never in a cookie or a URL. So another site cannot act through a user's browser. Three more checks
apply. If a browser believes that a foreign name is this machine (DNS rebinding), it sends that name
as its Host. A script of another site sends its Origin. If a page frames this one, the browser
refuses it because of the policy in the headers.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from importlib import resources
from types import MappingProxyType
from urllib.parse import urlsplit

import msgspec

from onceflow.core.runtime.driver.http_server import Request, Response

_CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "Content-Security-Policy": _POLICY,
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }
)
_SAME_SITE = frozenset({"same-origin", "none"})


@dataclass(frozen=True, slots=True)
class _Asset:
    content: bytes
    content_type: str
    tag: str


class WebPage:
    """The static files, read once. Any thread."""

    def __init__(self) -> None:
        self._assets: dict[str, _Asset] = {}
        for file in resources.files("onceflow.core.runtime.driver").joinpath("page").iterdir():
            suffix = file.name[file.name.rfind(".") :]
            if suffix not in _CONTENT_TYPES:
                continue
            content = file.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            self._assets[path] = _Asset(content, _CONTENT_TYPES[suffix], tag)

    def has(self, path: str) -> bool:
        """Return True if `path` is the path of a file."""
        return path in self._assets

    def answer(self, request: Request) -> Response:
        """Return the file at the path of `request`, or 304 if the browser has the current file."""
        asset = self._assets[urlsplit(request.target).path]
        headers = {
            **SECURITY_HEADERS,
            "Content-Type": asset.content_type,
            "Cache-Control": "no-cache",
            "ETag": asset.tag,
        }
        if request.headers.get("if-none-match") == asset.tag:
            return Response(HTTPStatus.NOT_MODIFIED, b"", headers)
        if request.method != "GET":
            return Response(HTTPStatus.METHOD_NOT_ALLOWED, b"", {**headers, "Allow": "GET"})
        return Response(HTTPStatus.OK, asset.content, headers)


def has_token(head: Request, token: str) -> bool:
    """Return True if the request shows `token`. Takes the same time for any wrong token."""
    given = head.headers.get("authorization", "").encode("utf-8", "replace")
    return hmac.compare_digest(given, f"Bearer {token}".encode())


def make_json_response(
    status: HTTPStatus,
    answer: object,
    headers: Mapping[str, str] = MappingProxyType({}),
    sent: Callable[[], None] = lambda: None,
) -> Response:
    """Return `answer` as JSON that browsers neither cache, frame nor show to another site."""
    content = answer if isinstance(answer, bytes) else msgspec.json.encode(answer, enc_hook=str)
    challenge = {"WWW-Authenticate": "Bearer"} if status is HTTPStatus.UNAUTHORIZED else {}
    return Response(
        status,
        content,
        {
            **SECURITY_HEADERS,
            "Content-Type": "application/json",
            "Cache-Control": "no-store",
            **challenge,
            **headers,
        },
        sent,
    )


def find_stranger(
    head: Request, names: Collection[str], *, setting: str = "endpoint.names"
) -> tuple[HTTPStatus, str] | None:
    """Return the status and reason to refuse a request from another site, or None if it is allowed.

    `names` are the host names of this endpoint, in lower case. An IP address is always allowed:
    DNS rebinding needs a name. `setting` is the setting in which users add names.
    """
    host = head.headers.get("host", "")
    if host and not _is_own(host, names):
        return HTTPStatus.MISDIRECTED_REQUEST, (
            f"Host: {host[:100]!r} is not a name of this endpoint: use its address, or add the"
            f" name to {setting}"
        )
    origin = head.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        return HTTPStatus.FORBIDDEN, f"Origin: {origin[:100]!r} is another site"
    site = head.headers.get("sec-fetch-site", "none")
    # A link on another site may open the page. That site can neither read it nor send requests.
    opens = head.headers.get("sec-fetch-mode") == "navigate" and head.method == "GET"
    if site not in _SAME_SITE and not opens:
        return (
            HTTPStatus.FORBIDDEN,
            f"Sec-Fetch-Site: {site[:40]!r}: the request comes from another site",
        )
    return None


def _is_own(host: str, names: Collection[str]) -> bool:
    try:
        name = (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return name == "localhost" or name in names
    return True
