"""Decode steps as a model runner prepares them, and what builds leave for them.

What two metadata builds leave for the FULL forward graph of a step is compared here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.tensors import (
    tensors,
)
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

# No step's metadata holds this value.
POISON = 0x7F7F

# Lengths at which a block, the window or the top-k of a compress ratio fills up.
EDGES = (1, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1023, 1024, 1025)

View = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """One decode step: the context length of each request after it.

    A uniform one has queries of ``query_len`` tokens. One of adaptive verification has
    queries of up to that many, ``query_lens``, in a graph of ``padded_tokens`` tokens.
    """

    seq_lens: tuple[int, ...]
    padded_reqs: int
    query_len: int
    seed: int = 0
    uneven: tuple[int, ...] | None = None
    graph_tokens: int | None = None

    @classmethod
    def random(
        cls,
        num_reqs: int,
        padded_reqs: int,
        query_len: int,
        max_model_len: int,
        seed: int,
    ) -> "Step":
        """Random lengths, with a preference for those at which something fills."""
        rng = np.random.default_rng(seed)
        edges = [max(edge, query_len) for edge in EDGES if edge < max_model_len]
        lens = np.where(
            rng.random(num_reqs) < 0.6,
            rng.choice([*edges, max_model_len - 1], num_reqs),
            rng.integers(query_len, max_model_len, num_reqs),
        )
        return cls(tuple(int(n) for n in lens), padded_reqs, query_len, seed)

    @property
    def num_reqs(self) -> int:
        return len(self.seq_lens)

    @property
    def query_lens(self) -> tuple[int, ...]:
        return self.uneven or (self.query_len,) * self.num_reqs

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def padded_tokens(self) -> int:
        return self.graph_tokens or self.padded_reqs * self.query_len


def write_step(
    step: Step,
    buffers: InputBuffers,
    block_tables: Sequence[torch.Tensor],
    block_sizes: Sequence[int],
    slot_mappings: torch.Tensor,
    num_blocks: int,
    max_model_len: int,
) -> InputBatch:
    """Write the step's inputs as the model runner does; returns its batch.

    Padding is written too.

    ``block_tables`` are [max_num_reqs, blocks] int32, one a KV-cache group with
    blocks of ``block_sizes`` tokens out of ``num_blocks``; ``slot_mappings`` is
    [groups, max_num_tokens] int64.
    """
    rng = np.random.default_rng(step.seed)
    device = buffers.device
    n, tokens = step.num_reqs, step.num_tokens
    batch = InputBatch.make_dummy(n, tokens, buffers)
    seq_lens = torch.tensor(step.seq_lens, dtype=torch.int32)
    # Adaptive verification splits the drafts on the device alone: the host believes
    # in an even split, and that each request may have all of its drafts.
    query_start_loc_np = np.full(step.padded_reqs + 1, tokens, dtype=np.int32)
    query_start_loc_np[: n + 1] = batch.query_start_loc_np
    if step.uneven is not None:
        batch = replace(
            batch,
            num_scheduled_tokens=np.full(n, step.query_len, dtype=np.int32),
            max_query_len=step.query_len,
        )
    query_lens = torch.tensor(step.query_lens)
    ends = query_lens.cumsum(0)
    buffers.query_start_loc[:n] = (ends - query_lens).to(device)

    def random_ints(low, high, shape, dtype):
        return torch.from_numpy(rng.integers(low, high, shape)).to(device, dtype)

    buffers.seq_lens.zero_()
    buffers.seq_lens[:n] = seq_lens.to(device)
    # Past the step's tokens the runner leaves what an earlier step wrote.
    buffers.positions[:] = random_ints(
        0, max_model_len, buffers.positions.shape, torch.int64
    )
    positions = (seq_lens - ends).repeat_interleave(query_lens) + torch.arange(tokens)
    buffers.positions[:tokens] = positions.to(device)
    slot_mappings.fill_(-1)
    for row in slot_mappings:
        row[:tokens] = torch.from_numpy(rng.choice(num_blocks, tokens, replace=False))
    for table, block_size in zip(block_tables, block_sizes, strict=True):
        # No two requests share a block they write.
        blocks = np.resize(rng.permutation(np.arange(1, num_blocks)), table.shape)
        used = -(-np.array(step.seq_lens) // block_size)
        unused = np.arange(table.shape[1]) >= used[:, None]
        # Columns past a request's blocks hold what an earlier request left; a
        # ring has one block, whatever the length.
        blocks[:n] = np.where(unused & (table.shape[1] > 1), -1, blocks[:n])
        blocks[n:] = 0
        table.copy_(torch.from_numpy(blocks.astype(np.int32)))
    seq_lens_cpu = torch.zeros(step.padded_reqs, dtype=torch.int32)
    seq_lens_cpu[:n] = seq_lens
    return replace(
        batch,
        num_reqs_after_padding=step.padded_reqs,
        num_tokens_after_padding=step.padded_tokens,
        query_start_loc=buffers.query_start_loc[: step.padded_reqs + 1],
        query_start_loc_np=query_start_loc_np,
        seq_lens=buffers.seq_lens[: step.padded_reqs],
        seq_lens_cpu_upper_bound=seq_lens_cpu,
        input_ids=buffers.input_ids[: step.padded_tokens],
        positions=buffers.positions[: step.padded_tokens],
        is_padding=buffers.is_padding[: step.padded_tokens],
    )


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def device_view(
    metadata: dict[str, Any], on_device: Callable[[torch.Tensor], bool]
) -> View:
    """Every device tensor of the metadata, once for all layers that share it.

    The key is the metadata's type, its first layer and the field.
    """
    first_layer: dict[int, tuple[str, Any]] = {}
    for layer, layer_metadata in metadata.items():
        first_layer.setdefault(id(layer_metadata), (layer, layer_metadata))
    return {
        f"{type(layer_metadata).__name__} {layer}{path}": tensor
        for layer, layer_metadata in first_layer.values()
        for path, tensor in tensors(layer_metadata)
        if on_device(tensor)
    }


def forward_view(
    build: Callable[[], dict[str, Any]],
    inputs: set[int],
    on_device: Callable[[torch.Tensor], bool],
) -> View:
    """What a FULL graph captured with the metadata of ``build`` reads of a step.

    A step refreshes all of it: constants and the forward's own scratch, which no
    build writes, are left out. ``inputs`` are the storages that the builds only read.
    """
    view = device_view(build(), on_device)
    before = clones(view)
    poison(built(view, inputs))
    build()
    for path, tensor in list(view.items()):
        if tensor.numel() and (tensor == POISON).all():
            tensor.copy_(before[path])
            del view[path]
    return view


def built(view: View, inputs: set[int]) -> View:
    """``view`` without the inputs of the build."""
    return {path: t for path, t in view.items() if storage(t) not in inputs}


def clones(view: View) -> View:
    return {path: tensor.clone() for path, tensor in view.items()}


def poison(view: View) -> None:
    for tensor in view.values():
        tensor.fill_(POISON)


def assert_same_for_forward(want: View, got: View, step: Step) -> None:
    """Compare real rows bitwise, and padding rows too but where it says nothing.

    That is where upstream's own value is arbitrary and no kernel reads it; it has to
    be within a stated set then.
    """
    assert want.keys() == got.keys()
    tokens, padded = step.num_tokens, step.padded_reqs
    for path, expected in want.items():
        actual = got[path]
        if torch.equal(expected, actual):
            continue
        # What is left can only be padding rows of tokens.
        assert len(actual) == step.padded_tokens, path
        assert torch.equal(expected[:tokens], actual[:tokens]), path
        padding = actual[tokens:]
        if path.endswith(("token_to_req_indices", "req_id_per_token")):
            # Masked by is_valid_token wherever it is an index.
            assert ((padding >= 0) & (padding < padded)).all(), path
        elif path.startswith("CompressorMetadata ") and path.endswith("slot_mapping"):
            # Eager points at the ring of request 0, which padding never writes.
            assert (padding == -1).all(), path
        elif path.endswith("decode.block_table"):
            # No context, so no column is read; the rows are those of null blocks.
            assert (got[path.replace("block_table", "seq_lens")][tokens:] == 0).all()
            assert (padding[:, 0] == 0).all(), path
        else:
            raise AssertionError(f"{path} differs in padding rows")
