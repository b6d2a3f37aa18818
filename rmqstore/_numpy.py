"""NumPy, imported when something of it is first asked for: ``from rmqstore import _numpy as np``.

Owns nothing but the delay.  NumPy took more than half of the time of ``import rmqstore``, and who reads or looks up message
by message needs nothing of it.  `sys.modules` holds the real NumPy or none, so no other program sees a difference.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy import *  # noqa: F403
else:

    def __getattr__(name):
        import numpy

        value = getattr(numpy, name)
        # From now on it is an attribute of this module, and costs what an attribute of NumPy's costs.
        globals()[name] = value
        return value
