"""The login page, which takes a token and sets the cookie of a session. It works without scripts."""

from __future__ import annotations

import re
from html import escape
from typing import Any, Final
from urllib.parse import parse_qs

import falcon

from geventstalk.http.access import Access
from geventstalk.http.backend import Backend
from geventstalk.http.params import wrong

_FORM_BYTES_MAX: Final = 4096
_LOCAL: Final = re.compile(r"/(?![/\\])[!-~]{0,2000}")
_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Log in to {name}</title>
<link rel="stylesheet" href="/login.css">
</head>
<body>
<main>
<h1><svg viewBox="0 0 32 32" aria-hidden="true"><path class="stalk" d="M16 28C16 19 13 15 16 4"/><path d="M15.2 19.5C9.5
20 6.5 17 6 12.5c5-.3 8.4 2 9.2 7zM16 13.5c.2-4.6 3.3-7.3 9.3-6.8 0 5.1-3.8 7.7-9.3 6.8z"/></svg>geventstalk</h1>
<p>{name}</p>
{problem}<form method="post" action="/login">
<label for="token">Token</label>
<input id="token" name="token" type="password" required autofocus autocomplete="current-password" spellcheck="false">
<input name="next" type="hidden" value="{next}">
<button>Log in</button>
</form>
<p class="hint">Tokens are in the file that the server has as <code>--http-tokens</code>.</p>
</main>
</body>
</html>
"""
_STYLE: Final = b"""\
/* The colours are those of the console. */
:root { color-scheme: light dark; --back: #fcfcfb; --front: #191d21; --soft: #59626b; --line: #8a939b;
  --accent: #0b6e5f; --on: #fff; --bad: #b3261e }
@media (prefers-color-scheme: dark) {
  :root { --back: #131618; --front: #e4e7e9; --soft: #98a3ad; --line: #66717b;
    --accent: #55c7b1; --on: #0d1a17; --bad: #ff8f82 }
}
* { box-sizing: border-box }
body { margin: 0; min-height: 100vh; display: grid; place-items: center; background: var(--back); color: var(--front);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif }
main { width: min(100% - 2rem, 21rem); padding-bottom: 10vh }
h1 { display: flex; align-items: center; gap: .5rem; margin: 0; font-size: 1.375rem; letter-spacing: -.01em }
svg { width: 1.75rem; height: 1.75rem; fill: var(--accent) }
.stalk { fill: none; stroke: var(--accent); stroke-width: 2.6; stroke-linecap: round }
p { margin: .25rem 0 1.25rem; color: var(--soft); overflow-wrap: anywhere }
p.problem { color: var(--bad); font-weight: 600 }
p.hint { margin: 1.25rem 0 0; font-size: .875rem }
code { white-space: nowrap }
label { display: block; margin-bottom: .25rem; font-weight: 600 }
input, button { width: 100%; padding: .5rem .75rem; border-radius: .375rem; font: inherit }
input { border: 1px solid var(--line); background: transparent; color: inherit }
button { margin-top: .75rem; border: 0; background: var(--accent); color: var(--on); font-weight: 600; cursor: pointer }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px }
"""


class LoginResource:
    """GET /login, and POST /login with the fields `token` and `next`."""

    public = True

    def __init__(self, backend: Backend, access: Access) -> None:
        self._backend = backend
        self._access = access

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        target = _local(req.get_param("next", default="/"))
        if self._access.identify(req, self._backend.now_ns()) is not None:
            raise falcon.HTTPSeeOther(target)
        self._show(req, resp, target)

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._access.require_own_page(req)
        data = req.stream.read(_FORM_BYTES_MAX + 1)
        if len(data) > _FORM_BYTES_MAX:
            raise wrong("the form is too large")
        try:
            fields = parse_qs(data.decode("latin-1"), max_num_fields=10)
        except ValueError:
            raise wrong("the form has too many fields") from None
        target = _local(fields.get("next", ["/"])[0])
        if not self._access.asks_for_tokens:
            raise falcon.HTTPSeeOther(target)
        cookie = self._access.log_in(req, fields.get("token", [""])[0].strip(), self._backend.now_ns())
        if cookie is None:
            resp.status = falcon.HTTP_403
            self._show(req, resp, target, "This token is not known.")
            return
        name, value = cookie
        secure = req.scheme == "https" or req.get_header("X-Forwarded-Proto") == "https"
        resp.set_cookie(name, value, path="/", http_only=True, same_site="Strict", secure=secure)
        resp.status = falcon.HTTP_303
        resp.location = target

    def _show(self, req: falcon.Request, resp: falcon.Response, target: str, problem: str = "") -> None:
        shown = f'<p class="problem" role="alert">{problem}</p>\n' if problem else ""
        # Only users that are logged in see the name of the host.
        name = self._backend.settings.name or req.host
        resp.text = _PAGE.format(name=escape(name), problem=shown, next=escape(target))
        resp.content_type = falcon.MEDIA_HTML


class LogoutResource:
    """POST /logout"""

    public = True

    def __init__(self, access: Access) -> None:
        self._access = access

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._access.require_own_page(req)
        resp.unset_cookie(self._access.log_out(req), path="/", same_site="Strict")
        raise falcon.HTTPSeeOther("/login")


class StyleResource:
    """GET /login.css"""

    public = True

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.data = _STYLE
        resp.content_type = "text/css; charset=utf-8"
        resp.set_header("Cache-Control", "max-age=3600")


def _local(target: str) -> str:
    """Returns the address, or / for one of another server: its link must not hide behind a login."""
    return target if _LOCAL.fullmatch(target) else "/"


def add(app: Any, backend: Backend, access: Access) -> None:
    app.add_route("/login", LoginResource(backend, access))
    app.add_route("/logout", LogoutResource(access))
    app.add_route("/login.css", StyleResource())
