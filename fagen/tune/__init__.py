"""The tuner. The package shares its name with the public function, so it can be called as one.

Whoever imports a module of this package makes `fagen.tune` the package; `fagen.tune(...)` must
work all the same.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fagen.tune.result import TuneResult


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> TuneResult:
        """See `fagen.tune.tuner.tune`."""
        from fagen.tune.tuner import tune

        return tune(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
