from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest
from xdist.workermanage import WorkerController

class LoadScopeScheduling:
    collection: Sequence[str] | None
    workqueue: OrderedDict[str, dict[str, bool]]
    def __init__(self, config: pytest.Config, log: Any = ...) -> None: ...
    def schedule(self) -> None: ...
    def _assign_work_unit(self, node: WorkerController) -> None: ...
