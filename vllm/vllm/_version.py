"""The fork's version: the release it is made for, and our count behind the plus.

Stated here alone; the build reads `__version__` without importing the package.
It must not contain "cpu": vLLM takes that for a build without a GPU.
"""

__version__ = "0.33.0+dsv41.1"

_release, _, _local = __version__.partition("+")
__version_tuple__: tuple[int | str, ...] = (*map(int, _release.split(".")), _local)
