# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels of the Hopper decode: compiled once a machine, launched by name.

``kernels.cu`` is compiled by NVRTC, which comes with torch and ``cuda-python``, so no
CUDA toolkit is needed where the fork serves. The cubin is kept in vLLM's cache folder
under the digest of all that it follows from; ranks of one node wait for the first.
"""

import ctypes
import functools
import hashlib
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import vllm.envs as envs
from cuda.bindings import driver, nvrtc
from filelock import FileLock
from vllm.logger import init_logger

logger = init_logger(__name__)

SOURCE = Path(__file__).with_name("kernels.cu")
ARCHITECTURE = "sm_90a"
OPTIONS = (f"--gpu-architecture={ARCHITECTURE}", "--std=c++17")

NAMES = (
    *(f"linear_{kind}_{width}" for kind in ("mxfp8", "bf16") for width in (1, 2, 4)),
    "experts_gate_up",
    "experts_down",
    "experts_sum",
)

# Shared memory that one block may have, in bytes (SM90).
MAX_SHARED_BYTES = 227 * 1024


class KernelError(RuntimeError):
    """NVRTC or the driver refused a kernel; the message says what it said."""


def _checked(result: tuple[Any, ...], what: str) -> Any:
    error, *values = result
    if error.value:
        raise KernelError(f"{what}: {error.name}")
    return values[0] if len(values) == 1 else tuple(values)


def _compile(source: str) -> bytes:
    program = _checked(
        nvrtc.nvrtcCreateProgram(source.encode(), SOURCE.name.encode(), 0, [], []),
        "creating the program",
    )
    options = [option.encode() for option in OPTIONS]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if error.value:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program), "reading the log")
        nvrtc.nvrtcGetProgramLog(program, log)
        raise KernelError(f"compiling {SOURCE.name}: {log.decode(errors='replace')}")
    cubin: bytes = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program), "sizing the cubin")
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin), "reading the cubin")
    nvrtc.nvrtcDestroyProgram(program)
    return cubin


def compiled() -> bytes:
    """The cubin of ``kernels.cu``, from the cache where it is there.

    Raises KernelError where NVRTC refuses the source.
    """
    source = SOURCE.read_text()
    version = _checked(nvrtc.nvrtcVersion(), "asking NVRTC for its version")
    digest = hashlib.sha256(repr((source, OPTIONS, version)).encode()).hexdigest()
    folder = Path(envs.VLLM_CACHE_ROOT) / "deepseek_v41_hopper"
    folder.mkdir(parents=True, exist_ok=True)
    cubin = folder / f"{digest[:32]}.cubin"
    with FileLock(f"{cubin}.lock"):
        if not cubin.exists():
            start = time.perf_counter()
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as new:
                new.write(_compile(source))
            os.replace(new.name, cubin)
            logger.info(
                "DeepSeek-V4.1 decode: compiled the Hopper kernels in %.1f s.",
                time.perf_counter() - start,
            )
    return cubin.read_bytes()


class Kernels:
    """The compiled kernels in the CUDA context that is current."""

    def __init__(self) -> None:
        # Makes torch's context the current one, in a process that has no tensor yet.
        torch.cuda.synchronize()
        self._module = _checked(
            driver.cuModuleLoadData(compiled()), "loading the kernels"
        )
        self._functions: dict[str, Any] = {}

    def load(self) -> None:
        """Make every kernel ready: nothing may load while a graph is captured."""
        for name in NAMES:
            self.function(name)

    def function(self, name: str) -> Any:
        """The kernel ``name``, allowed all shared memory that a block may have."""
        function = self._functions.get(name)
        if function is None:
            function = _checked(
                driver.cuModuleGetFunction(self._module, name.encode()), name
            )
            attribute = driver.CUfunction_attribute
            static = _checked(
                driver.cuFuncGetAttribute(
                    attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function
                ),
                name,
            )
            _checked(
                driver.cuFuncSetAttribute(
                    function,
                    attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    MAX_SHARED_BYTES - static,
                ),
                name,
            )
            self._functions[name] = function
        return function

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        cluster: int,
        threads: int,
        shared_bytes: int,
        arguments: ctypes.Structure,
    ) -> None:
        """Launch ``name`` on torch's current stream, in clusters of ``cluster`` blocks
        along x. It may start before the kernels before it end, and waits for them
        itself.
        """
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        ids = driver.CUlaunchAttributeID
        early = driver.CUlaunchAttribute()
        early.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        attributes = [early]
        if cluster > 1:
            clusters = driver.CUlaunchAttribute()
            clusters.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dimension = clusters.value.clusterDim
            dimension.x, dimension.y, dimension.z = cluster, 1, 1
            attributes.append(clusters)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        _checked(
            driver.cuLaunchKernelEx(
                config, self.function(name), ctypes.addressof(parameters), 0
            ),
            f"launching {name}",
        )


@functools.cache
def kernels() -> Kernels:
    """The kernels of this process. Raises KernelError where they cannot be had."""
    return Kernels()
