"""The `outrider` command: one file per subcommand."""

import sys
from typing import Any

_usual_hook = sys.excepthook


def _hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Ctrl-C before `main` is reached, while modules are read, is no error to show."""
    if not issubclass(kind, KeyboardInterrupt):
        _usual_hook(kind, error, trace)


sys.excepthook = _hook
