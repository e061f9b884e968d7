"""The timeout of a process group, which the groups of a mesh do not get from `init_process_group`.

`init_device_mesh` and `new_group` give their groups PyTorch's default, 30 minutes on gloo, whatever the timeout of the
default group is (torch 2.13). The timeout of gloo's sends and receives is fixed when the group is created, while
collectives read it at every call.
"""

from __future__ import annotations

import datetime
from typing import Any

from torch import distributed
from torch.distributed import constants

_DEFAULTS = (constants.default_pg_timeout, constants.default_pg_nccl_timeout)


def adopt_timeout(group: Any) -> datetime.timedelta | None:
    """Give a group with PyTorch's default timeout that of the default group, if it is shorter.

    Args:
        group: of torch.distributed.

    Returns:
        The timeout of the group; None if PyTorch does not say.
    """
    own, default = _timeout(group), _timeout(distributed.group.WORLD)
    if own is None or default is None or own not in _DEFAULTS or own <= default:
        return own
    group.set_timeout(default)
    return default


def _timeout(group: Any) -> datetime.timedelta | None:
    """The timeout of a group's first backend."""
    try:
        backend = group._get_backend(group._device_types[0])
        timeout: datetime.timedelta = backend.options._timeout
    except (AttributeError, IndexError, RuntimeError):  # no public name, and not every backend has one
        return None
    return timeout
