"""A REST catalog whose requests end: pyiceberg's own wait for an answer for ever."""

from __future__ import annotations

from functools import partial
from typing import Any

from pyiceberg.catalog.rest import RestCatalog
from typing_extensions import override

CONNECT_S = 5.0
ANSWER_S = 60.0
"""To the next byte of an answer: half of `commit_deadline_s`, so that a commit whose reply does not
come is looked for in time."""


class RestCatalogWithDeadlines(RestCatalog):
    """The library's catalog, with a deadline for every request, its first one included."""

    @override
    def _create_session(self) -> Any:
        session: Any = super()._create_session()
        # `requests` has no deadline of a session: one that is left out of a single call waits for
        # ever.
        session.request = partial(session.request, timeout=(CONNECT_S, ANSWER_S))
        return session
