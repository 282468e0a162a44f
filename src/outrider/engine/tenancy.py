"""Several engines can drive one target; its KV holds the requests of one of them at a time.

That lets plain and speculative decoding share the weights. An engine that finds another one's KV
in the target computes its running requests again.
"""

from dataclasses import dataclass, field
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

from outrider.target.base import Target


@dataclass(slots=True)
class Tenancy:
    """Who used a target last, the pages allocated in it, and whose turn it is."""

    tenant: object | None = None
    num_pages: int = 0
    lock: Any = field(default_factory=RLock)  # held by the thread that uses the target

    def take(self, target: Target, tenant: object, num_pages: int) -> bool:
        """Make `tenant` the user of the KV; False when the KV it left there is gone."""
        if self.tenant is tenant:
            return True
        if self.num_pages != num_pages:
            target.allocate_kv(num_pages)
        self.tenant, self.num_pages = tenant, num_pages
        return False


_TENANCIES: WeakKeyDictionary[Target, Tenancy] = WeakKeyDictionary()


def tenancy_of(target: Target) -> Tenancy:
    """The one tenancy of a target."""
    return _TENANCIES.setdefault(target, Tenancy())
