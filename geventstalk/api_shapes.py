"""Shapes of the API's JSON that the server and its clients make alike. Pure."""

from __future__ import annotations

import codecs
from base64 import b64encode
from typing import Final

RATES: Final = ("put", "reserve", "delete", "timeout", "bury")


def body_shape(body: bytes, size: int, most: int) -> dict[str, object]:
    """Returns at most `most` of the first `size` bytes: as text if they are UTF-8, else in base64.

    A character that is cut in two at the end does not make text binary.
    """
    shown = body[: min(size, most)]
    whole = len(shown) == size
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(shown, whole)
    except UnicodeDecodeError:
        return {"encoding": "base64", "data": b64encode(shown).decode("ascii"), "whole": whole}
    return {"encoding": "text", "data": text, "whole": whole}
