"""Random jobs of the fused decode-metadata launch, and their comparison.

The jobs write guarded buffers, on random decode steps; the reference does the same.

A case is made on the CPU and copied to the device as whole buffers, so that nothing
but the launch itself runs there.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from decode_metadata_reference import TensorJob, reference
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.jobs import (
    DecodeInputs,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.kernel import (
    Kind,
    job_table,
    write_decode_metadata,
)

# Fills what the launch must write, and all around it that it must not; no value of
# a step consists of it.
_POISON = 0x7F
# More elements than a program of the launch writes at once.
_GUARD = 512
_MAX_INT32 = 2**31 - 1
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """What a launch is padded to.

    Requests and tokens, the columns of the block tables, the largest window, and the
    columns of the tables that are written of them; where 0, all or some.
    """

    num_reqs: int
    num_tokens: int
    columns: int
    max_window: int = 128
    out_columns: int = 0


@dataclass(frozen=True)
class _Group:
    """A KV-cache group: blocks of ``split * block_size * ratio`` tokens."""

    columns: int
    stride: int
    num_blocks: int
    split: int
    scale: int
    clamp: bool
    block_size: int
    ratio: int

    @property
    def max_tokens(self) -> int:
        return self.columns * self.split * self.block_size * self.ratio


# Positions of the groups of a case; the table of the last one is clamped in place.
_WINDOW, _COMPRESSED, _RING, _CLAMPED = range(4)


class Case(NamedTuple):
    """Jobs, and the inputs they are run with."""

    inputs: DecodeInputs
    jobs: tuple[TensorJob, ...]

    def to(self, device: torch.device) -> "Case":
        """A copy that shares no memory with this case."""
        buffers: dict[int, torch.Tensor] = {}

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            address = tensor.untyped_storage().data_ptr()
            if address not in buffers:
                buffers[address] = whole(tensor).to(device, copy=True)
            return buffers[address].as_strided(
                tensor.shape, tensor.stride(), tensor.storage_offset()
            )

        inputs = DecodeInputs(
            copied(self.inputs.query_start_loc),
            copied(self.inputs.seq_lens),
            copied(self.inputs.positions),
            copied(self.inputs.replay_start),
            tuple(map(copied, self.inputs.block_tables)),
            copied(self.inputs.slot_mappings),
        )
        jobs = [
            replace(
                job, outs=tuple(out if out is None else copied(out) for out in job.outs)
            )
            for job in self.jobs
        ]
        return Case(inputs, tuple(jobs))

    def outs(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, job in enumerate(self.jobs):
            for index, out in enumerate(job.outs):
                if out is not None:
                    yield f"job {number}, {job.kind.name} outs[{index}]", out

    def buffers(self) -> dict[str, torch.Tensor]:
        """All memory of the case, flat, by what lies in it."""
        inputs = zip(_input_names(self.inputs), self.inputs.tensors(), strict=True)
        return {name: whole(tensor) for name, tensor in (*inputs, *self.outs())}

    def load(self, other: "Case") -> None:
        """Take over the contents of a case of the same shape and seed."""
        theirs = other.buffers()
        for name, mine in self.buffers().items():
            mine.copy_(theirs[name])

    def launcher(
        self,
        max_num_reqs: int,
        max_window: int,
        made_for: tuple[int, int] | None = None,
    ) -> Callable[[], None]:
        """What launches the jobs, with the bounds that choose the kernel.

        The table of jobs is made for its own requests and tokens, or for so many.
        """
        inputs = self.inputs
        jobs = job_table(
            [job.job(inputs) for job in self.jobs],
            *(made_for or (inputs.num_reqs, inputs.num_tokens)),
            inputs.seq_lens.device,
        )
        return lambda: write_decode_metadata(
            jobs,
            inputs.query_start_loc,
            inputs.seq_lens,
            inputs.positions,
            inputs.replay_start,
            inputs.num_reqs,
            inputs.num_tokens,
            max_num_reqs,
            max_window,
        )

    def expected(self) -> "Case":
        """This case after its jobs, by the reference."""
        done = self.to(self.inputs.seq_lens.device)
        for job, done_job in zip(self.jobs, done.jobs, strict=True):
            for value, out in zip(
                reference(job, self.inputs), done_job.outs, strict=True
            ):
                if out is not None:
                    assert value is not None
                    assert value.shape == out.shape
                    out.copy_(value)
        return done


def assert_same(want: Case, got: Case) -> None:
    """All memory of the two cases bitwise equal: values, guards and inputs."""
    got = got.to(_CPU)
    for (name, expected), (_, actual) in zip(want.outs(), got.outs(), strict=True):
        assert torch.equal(expected, actual), f"{name}: other values"
    actual_buffers = got.buffers()
    for name, expected in want.buffers().items():
        assert torch.equal(expected, actual_buffers[name]), f"{name}: written outside"


def _input_names(inputs: DecodeInputs) -> Iterator[str]:
    for name, value in inputs._asdict().items():
        if isinstance(value, tuple):
            yield from (f"{name}[{index}]" for index in range(len(value)))
        else:
            yield name


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that a tensor is a view of."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((size,), (1,), 0)


def _poisoned(
    shape: tuple[int, ...], dtype: torch.dtype, stride: int = 0, guard: int = 0
) -> torch.Tensor:
    """A poisoned tensor whose rows lie ``stride`` elements apart.

    ``guard`` elements come before and after them, and no element more.
    """
    *rows, columns = shape
    strides = (stride or columns, 1)[-len(shape) :]
    size = (rows[0] - 1) * strides[0] + columns if rows else columns
    memory = torch.empty(size + 2 * guard, dtype=dtype)
    memory.view(torch.uint8).fill_(_POISON)
    return memory.as_strided(shape, strides, guard)


class _Layout:
    """The groups and jobs of a shape, without values."""

    def __init__(self, shape: Shape, rng: np.random.Generator) -> None:
        self.shape = shape
        self.rng = rng
        self.groups = [
            self._group(ratios=(1,), int32_slots=True),
            self._group(),
            self._group(columns=1),
            self._group(splits=(1,), clamp=True),
        ]

    def _choice(self, *values: int) -> int:
        return int(self.rng.choice(values))

    def _group(
        self,
        columns: int = 0,
        splits: Sequence[int] = (1, 2, 3),
        ratios: Sequence[int] = (1, 2),
        clamp: bool | None = None,
        int32_slots: bool = False,
    ) -> _Group:
        columns = columns or self.shape.columns
        split = self._choice(*splits)
        scale = split if clamp else split + self._choice(0, 3)
        block_size = self._choice(1, 5, 8, 64)
        # Else only the number of a kernel block has to fit 32 bits.
        slots_per_block = block_size if int32_slots else 1
        return _Group(
            columns,
            columns + self._choice(0, 3),
            _MAX_INT32 // (scale * slots_per_block) - 1,
            split,
            scale,
            bool(self._choice(0, 1)) if clamp is None else clamp,
            block_size,
            self._choice(*ratios),
        )

    def tables(self) -> Iterator[torch.Tensor]:
        for group in self.groups:
            shape = self.shape.num_reqs, group.columns
            # The clamped one is written too.
            guard = _GUARD if group is self.groups[_CLAMPED] else 0
            yield _poisoned(shape, torch.int32, group.stride, guard)

    def _out(
        self, dtype: torch.dtype, rows: int, columns: int | None = None
    ) -> torch.Tensor:
        guard = _GUARD + self._choice(0, 1, 3)
        if columns is None:
            return _poisoned((rows,), dtype, guard=guard)
        stride = columns + self._choice(0, 5)
        return _poisoned((rows, columns), dtype, stride, guard)

    def _job(self, kind: Kind, group: int, *outs: torch.Tensor | None) -> TensorJob:
        of = self.groups[group]
        return TensorJob(
            kind, outs, group, of.split, of.scale, of.clamp, of.block_size, of.ratio
        )

    def jobs(self, kind: Kind, tables: Sequence[torch.Tensor]) -> Iterator[TensorJob]:
        num_reqs, num_tokens = self.shape.num_reqs, self.shape.num_tokens
        if kind == Kind.REQUEST:
            yield self._job(kind, _WINDOW, self._out(torch.int32, num_tokens))
        elif kind == Kind.WINDOW:
            window = self._choice(1, 5, self.shape.max_window)
            job = self._job(
                kind,
                _WINDOW,
                self._out(torch.uint8, num_tokens),
                self._out(torch.int32, num_tokens),
                self._out(torch.int32, num_tokens, window),
            )
            yield replace(job, window=window)
        elif kind == Kind.COMPRESSED_SLOT:
            yield self._job(kind, _COMPRESSED, self._out(torch.int64, num_tokens))
        elif kind == Kind.RING_SLOT:
            yield self._job(kind, _RING, self._out(torch.int64, num_tokens))
        elif kind == Kind.CONTEXT:
            for given in product((False, True), repeat=4):
                rows = num_tokens, num_reqs, num_tokens, num_tokens
                outs = [
                    self._out(torch.int32, count) if has else None
                    for has, count in zip(given, rows, strict=True)
                ]
                yield self._job(kind, _COMPRESSED, *outs)
        elif kind == Kind.TABLE:
            columns = self._columns(_COMPRESSED)
            yield self._job(
                kind, _COMPRESSED, self._out(torch.int32, num_reqs, columns)
            )
            yield self._job(kind, _CLAMPED, tables[_CLAMPED])
            # Reads what the job before writes: both clamp, so the order is free.
            out = self._out(torch.int64, num_tokens)
            yield self._job(Kind.COMPRESSED_SLOT, _CLAMPED, out)
        elif kind == Kind.TOKEN_TABLE:
            columns = self._columns(_COMPRESSED)
            out = self._out(torch.int32, num_tokens, columns)
            yield self._job(kind, _COMPRESSED, out)
        else:
            for item_tokens in sorted({1, min(2, num_tokens), min(4, num_tokens)}):
                workers = self._choice(1, 3, 132, 300)
                out = _poisoned((workers + 1, 2), torch.int32, guard=_GUARD)
                yield replace(
                    self._job(kind, _COMPRESSED, out),
                    block_size=self._choice(3, 64, 256),
                    workers=workers,
                    item_tokens=item_tokens,
                )

    def _columns(self, group: int) -> int:
        """All kernel blocks of a table, or the first so many."""
        if self.shape.out_columns:
            return self.shape.out_columns
        columns = self.groups[group].columns * self.groups[group].split
        return self._choice(columns, max(1, columns - 1), (columns + 1) // 2)

    @property
    def max_model_len(self) -> int:
        limits = [g.max_tokens for g in self.groups if g is not self.groups[_RING]]
        return min(limits)


def _write_random_step(
    inputs: DecodeInputs, layout: _Layout, rng: np.random.Generator
) -> None:
    """A step of any number of requests from none to all, even or uneven.

    Some have no token; some tokens are not to be cached; some blocks are missing.
    """
    padded, num_tokens = inputs.num_reqs, inputs.num_tokens
    num_reqs = (0, 1, padded, int(rng.integers(padded + 1)))[rng.integers(4)]
    even = num_tokens // padded
    query_lens = np.full(num_reqs, even)
    if rng.random() < 0.7:
        query_lens = rng.integers(0, 2 * even + 2, num_reqs)
    query_lens = np.minimum(query_lens, layout.max_model_len)
    ends = np.zeros(padded, dtype=np.int64)
    ends[:num_reqs] = np.minimum(query_lens.cumsum(), num_tokens)
    ends[num_reqs:] = ends[:num_reqs].max(initial=0)
    starts = np.concatenate(([0], ends))
    query_lens = np.diff(starts)
    longest = np.full(padded, layout.max_model_len)
    lens = rng.integers(query_lens, longest + 1)
    lens = np.choose(rng.integers(0, 4, padded), [query_lens, longest, lens, lens])
    lens[num_reqs:] = 0
    replay_start = rng.integers(0, lens + 1)
    replay_start[rng.random(padded) < 0.5] = 0
    # Past the step's tokens the runner leaves what an earlier step wrote.
    positions = rng.integers(0, layout.max_model_len, num_tokens)
    request = np.repeat(np.arange(padded), query_lens)
    real = len(request)
    positions[:real] = lens[request] - (ends[request] - np.arange(real))
    slots = rng.integers(0, 2**40, inputs.slot_mappings.shape)
    slots[rng.random(slots.shape) < 0.2] = 0
    slots[rng.random(slots.shape) < 0.2] = -1
    # A replayed token is cached already.
    slots[:, :real][:, positions[:real] < replay_start[request]] = -1
    slots[:, real:] = -1
    values = [starts, lens, positions, replay_start]
    for group in layout.groups:
        table = rng.integers(1, group.num_blocks, (padded, group.columns))
        table[rng.random(table.shape) < 0.1] = 0
        table[rng.random(table.shape) < 0.1] = -1
        table[num_reqs:] = 0
        values.append(table)
    for tensor, value in zip(inputs.tensors(), [*values, slots], strict=True):
        tensor.copy_(torch.from_numpy(value))


def random_case(
    shape: Shape, seed: int, step: int = 0, kinds: Sequence[Kind] = tuple(Kind)
) -> Case:
    """The jobs that ``seed`` gives, on the CPU, with outputs poisoned.

    There is one of each of ``kinds`` at least, for the decode step that ``step``
    gives.
    """
    layout = _Layout(shape, np.random.default_rng(seed))
    tables = tuple(layout.tables())
    inputs = DecodeInputs(
        _poisoned((shape.num_reqs + 1,), torch.int32),
        _poisoned((shape.num_reqs,), torch.int32),
        _poisoned((shape.num_tokens,), torch.int64),
        _poisoned((shape.num_reqs,), torch.int32),
        tables,
        _poisoned((len(tables), shape.num_tokens), torch.int64),
    )
    jobs = [job for kind in kinds for job in layout.jobs(kind, tables)]
    _write_random_step(inputs, layout, np.random.default_rng((seed, step)))
    return Case(inputs, tuple(jobs))
