# SPDX-License-Identifier: Apache-2.0
"""The decode steps on which a fused build is held to upstream's builders.

A kernel branches at lengths: where a block, a window or a unit of a schedule fills
up, where every worker gets one, at a power of two, at the ends. Lengths drawn evenly
from a long context meet none of these, so here they are drawn at and around them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle, islice
from random import Random
from typing import Any

import torch

from .jobs import DecodeInputs
from .kernel import Job, Kind, longest_window

# Numbers of KV-cache blocks and slots go up to this.
_NUMBERS = 2**20


@dataclass(frozen=True)
class DecodeStep:
    """A decode step, and what a comparison makes of it.

    ``query_lens`` and ``seq_lens`` [requests] are those of the real requests,
    ``replay_starts`` [requests] where each has window state from; all that the shape
    holds besides is padding. ``no_block`` is how often a block past the first is
    negative, ``no_slot`` how often a token is not to be cached, each KV-cache group on
    its own; ``idle`` is the dummy batch of an idle rank, which caches nothing and has
    null blocks.
    ``poison`` overwrites what a build has to write; a bool can hold only 0 and 1.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    replay_starts: tuple[int, ...]
    poison: int
    no_block: float = 0.0
    no_slot: float = 0.0
    idle: bool = False

    def write(self, inputs: DecodeInputs, seed: int) -> None:
        """Put it into ``inputs``, the same for the same ``seed``.

        Allocates nothing of the size of a block table: these are wide where contexts
        are long.
        """
        device = inputs.seq_lens.device
        random = torch.Generator(device).manual_seed(seed)
        num_reqs = len(self.seq_lens)
        query_lens = torch.tensor(self.query_lens)
        ends = query_lens.cumsum(0)
        num_tokens = sum(self.query_lens)
        inputs.query_start_loc.fill_(num_tokens)
        inputs.query_start_loc[:num_reqs] = ends - query_lens
        _put(inputs.seq_lens, self.seq_lens)
        _put(inputs.replay_start, self.replay_starts)
        # Past its tokens a step leaves what an earlier one wrote.
        inputs.positions.random_(0, _NUMBERS, generator=random)
        past_starts = (torch.tensor(self.seq_lens) - ends).repeat_interleave(query_lens)
        inputs.positions[:num_tokens] = past_starts + torch.arange(num_tokens)
        slots = inputs.slot_mappings
        _draw(slots, self.no_slot, random)
        slots[:, 0 if self.idle else num_tokens :] = -1
        for table in inputs.block_tables:
            # What lies past a request's blocks may be anything.
            _draw(table, self.no_block, random)
            table[:, 0].random_(1, _NUMBERS, generator=random)
            table[0 if self.idle else num_reqs :] = 0


def _put(rows: torch.Tensor, values: Sequence[int]) -> None:
    """``values`` into the first of ``rows``, zeros into the others."""
    rows.zero_()
    rows[: len(values)] = torch.tensor(values, dtype=rows.dtype)


def _draw(out: torch.Tensor, negative: float, random: torch.Generator) -> None:
    """Fill ``out`` with numbers, of which the share ``negative`` is -1."""
    below = int(_NUMBERS * negative / (1 - negative))
    out.random_(-below, _NUMBERS, generator=random).clamp_(min=-1)


def decode_steps(
    jobs: Sequence[Job],
    num_reqs: int,
    num_tokens: int,
    max_query_len: int | None,
    max_len: int,
) -> Iterator[DecodeStep]:
    """Steps for a shape of ``num_reqs`` requests and ``num_tokens`` tokens, as many as
    it takes to meet every length at which one of ``jobs`` branches; queries are all as
    long or, if given, up to ``max_query_len``, and sequences up to ``max_len`` tokens
    long. The same for every call.
    """
    window = longest_window(jobs)
    random = Random(num_reqs)
    query_len = num_tokens // num_reqs if max_query_len is None else 1
    # Requests that can have all the tokens.
    fewest = -(-num_tokens // (max_query_len or query_len))

    def near_end(seq_len: int) -> int:
        """A replay's start about where the last token's window begins."""
        back = (1, window - 1, window, window + 1, random.randint(1, 2 * window))
        return max(0, seq_len - random.choice(back))

    def step(
        seq_lens: tuple[int, ...],
        poison: int,
        starts: tuple[int, ...] = (0,) * num_reqs,
        **options: Any,
    ) -> DecodeStep:
        query_lens = (query_len,) * len(seq_lens)
        if max_query_len is not None:
            query_lens = _uneven(seq_lens, num_tokens, max_query_len, random)
        starts = starts[: len(seq_lens)]
        return DecodeStep(query_lens, seq_lens, starts, poison, **options)

    shortest = min(query_len, max_len)
    longest = [max_len, *(random.randint(shortest, max_len) for _ in range(num_reqs))]
    most = tuple(longest[: max(1, num_reqs - 1)])
    # The first request is the longest there can be.
    yield step(most, 0x7F, no_block=0.8)
    # The least work there is: for one request, and for all.
    yield step((shortest,), 0, no_block=0.8)
    each, more = divmod(num_tokens, num_reqs)
    lens = (each,) * (num_reqs - more) + (each + 1,) * more
    yield DecodeStep(lens, lens, (0,) * num_reqs, 0x7F, idle=True)
    # Where a token is cached says nothing of its length: often enough that it is
    # cached in some groups only.
    for seq_lens in (most, most[:fewest]):
        yield step(seq_lens, 0, no_block=0.5, no_slot=0.5)
    for seq_lens in _few_units(jobs, num_reqs, query_len, max_len):
        starts = (0,) * len(seq_lens)
        yield DecodeStep((query_len,) * len(seq_lens), seq_lens, starts, 0x7F)
    lengths = _bounds(jobs, query_len, max_len)
    lengths += random.choices(lengths, k=-len(lengths) % num_reqs)
    turns = cycle(lengths)
    met = 0
    for turn in count():
        few = random.choice((fewest, num_reqs, random.randint(1, num_reqs)))
        requests = num_reqs if max_query_len is None else few
        seq_lens = tuple(islice(turns, requests))
        starts = tuple(near_end(n) if turn % 2 else 0 for n in seq_lens)
        poison = 0x7F if turn % 4 < 2 else 0
        yield step(seq_lens, poison, starts, no_block=0.5)
        met += requests
        if met >= len(lengths) and turn > 0:
            break


def _uneven(
    seq_lens: Sequence[int], num_tokens: int, max_query_len: int, random: Random
) -> tuple[int, ...]:
    """Query lengths of a step in which sequences are ``seq_lens`` long: of 1 to
    ``max_query_len`` tokens, ``num_tokens`` in all every other time, else fewer.
    """
    query_lens = [1] * len(seq_lens)
    room = [min(max_query_len, seq_len) - 1 for seq_len in seq_lens]
    drafts = [index for index, most in enumerate(room) for _ in range(most)]
    random.shuffle(drafts)
    most = num_tokens - len(seq_lens)
    for index in drafts[: random.choice((most, random.randint(0, most)))]:
        query_lens[index] += 1
    return tuple(query_lens)


def _few_units(
    jobs: Sequence[Job], num_reqs: int, query_len: int, max_len: int
) -> Iterator[tuple[int, ...]]:
    """Lengths that make one unit less than a schedule has workers, as many, and one
    more, over as many requests as can have one in each of their items.
    """
    schedules = {
        (job.workers, job.block_size * job.ratio, job.item_tokens)
        for job in jobs
        if job.kind == Kind.SCHEDULE
    }
    for workers, unit, item_tokens in sorted(schedules):
        for units in (workers - 1, workers, workers + 1):
            each, more = divmod(units, query_len // item_tokens)
            requests = max(1, min(num_reqs, each))
            full, one_more = divmod(each, requests)
            lens = [unit * (full + (index < one_more)) for index in range(requests)]
            # The last items of the first request reach into another unit.
            lens[0] += more * item_tokens
            if query_len <= min(lens) and max(lens) <= max_len:
                yield tuple(lens)


def _bounds(jobs: Sequence[Job], query_len: int, max_len: int) -> list[int]:
    """Lengths of sequences whose ``query_len`` last tokens lie at and on both sides of
    every length at which one of ``jobs`` branches, up to ``max_len``, ascending.
    """
    # Upstream may branch at others, as its top-k: these are powers of two.
    at = {max_len - 1, *(1 << power for power in range(max_len.bit_length()))}
    for job in jobs:
        unit = job.block_size * job.ratio
        at |= {job.window, unit, unit * job.split}
    lengths = {
        length
        for bound in at
        if bound > 1
        for length in range(bound + 1, bound - 2, -query_len)
    }
    return sorted(n for n in lengths if query_len <= n <= max_len) or [max_len]
