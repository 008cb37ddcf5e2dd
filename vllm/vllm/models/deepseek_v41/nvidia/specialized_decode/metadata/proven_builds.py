# SPDX-License-Identifier: Apache-2.0
"""The fused builds of a deployment, each held to upstream's builders before use."""

from vllm.logger import init_logger

from .fused_build import BuildFn, FusedBuild
from .proof import difference_from_upstream

logger = init_logger(__name__)


class FusedBuilds:
    """Proven fused builds by their padded shape (requests, tokens)."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._proven: dict[tuple[int, int], FusedBuild] = {}
        self._refused: dict[tuple[int, int], FusedBuild] = {}
        # Whether DeepGEMM was found to schedule otherwise than the launch does.
        self._deepgemm_schedules = False

    def proven(self, build: FusedBuild) -> FusedBuild | None:
        """A proven build that writes what ``build`` does, or None. Does no work on
        the device."""
        return _alike(self._proven, build)

    def prove(self, build: FusedBuild, build_upstream: BuildFn) -> FusedBuild | None:
        """``proven``, after comparing ``build`` to ``build_upstream`` if need be.

        Where its schedules of DeepGEMM's are all that differs, DeepGEMM goes on to
        make them. Whatever else goes wrong means that the fused build is not used.
        """
        known = self.proven(build)
        if known is not None:
            return known
        if _alike(self._refused, build) is not None:
            return None
        try:
            build, path = self._compared(build, build_upstream)
        except Exception:
            logger.exception("Comparing the fused attention metadata failed.")
            path = "nothing"
        if path is not None:
            logger.error(
                "DeepSeek-V4.1 decode: the fused metadata build of %d requests of %d "
                "tokens differs from upstream's in %s, and is not used. Please report "
                "this.",
                *build.shape,
                path,
            )
            self._refused[build.shape] = build
            return None
        self._proven[build.shape] = build
        return build

    def _compared(
        self, build: FusedBuild, build_upstream: BuildFn
    ) -> tuple[FusedBuild, str | None]:
        """``build``, or itself with DeepGEMM's own schedules where it takes that to
        be equal, and the path where it is not."""
        if self._deepgemm_schedules:
            build = build.with_deepgemm_schedules()
        path = difference_from_upstream(build, build_upstream, self._max_model_len)
        if path is None or not build.knows_schedules:
            return build, path
        rest = build.with_deepgemm_schedules()
        still = difference_from_upstream(rest, build_upstream, self._max_model_len)
        if still is None:
            self._deepgemm_schedules = True
            logger.warning(
                "DeepSeek-V4.1 decode: DeepGEMM makes the schedule of the indexer's "
                "logits in launches of its own, as it comes out other than expected "
                "in %s. Please report this.",
                path,
            )
        return rest, still

    def release(self) -> None:
        """Forget the builds, with the buffers they keep alive."""
        self._proven.clear()
        self._refused.clear()


def _alike(
    builds: dict[tuple[int, int], FusedBuild], build: FusedBuild
) -> FusedBuild | None:
    known = builds.get(build.shape)
    return known if known is not None and known.writes_for(build) else None
