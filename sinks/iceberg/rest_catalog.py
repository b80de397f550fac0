"""A REST catalog with deadlines, because pyiceberg's own waits for an answer for ever."""

from __future__ import annotations

from functools import partial
from typing import Any

from pyiceberg.catalog.rest import RestCatalog
from typing_extensions import override

CONNECT_S = 5.0
ANSWER_S = 60.0
"""The limit of time until the next byte of an answer: half of `commit_deadline_s`, so that a commit
without a reply is looked up in time."""


class RestCatalogWithDeadlines(RestCatalog):
    """The library's REST catalog, with a deadline for every request, including the first."""

    @override
    def _create_session(self) -> Any:
        session: Any = super()._create_session()
        # A session of `requests` has no deadline; a call without a timeout waits for ever.
        session.request = partial(session.request, timeout=(CONNECT_S, ANSWER_S))
        return session
