# SPDX-License-Identifier: Apache-2.0
"""How large a decode batch the FULL graphs take, and what to do where that is less
than the scheduler may run.
"""

from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch


class Coverage:
    """The largest batches of the FULL decode graphs that were captured."""

    def __init__(self) -> None:
        # (requests, tokens), by query length and whether queries may be shorter.
        self._largest: dict[tuple[int, bool], tuple[int, int]] = {}

    def add(self, graph: BatchExecutionDescriptor) -> None:
        """Take in a FULL graph; one that takes prefills too is no decode graph."""
        shorter = graph.uniform_token_count is None
        query_len = graph.max_query_len if shorter else graph.uniform_token_count
        if query_len is None or graph.num_reqs is None:
            return
        reqs, tokens = self._largest.get((query_len, shorter), (0, 0))
        largest = max(reqs, graph.num_reqs), max(tokens, graph.num_tokens)
        self._largest[query_len, shorter] = largest

    def clear(self) -> None:
        """Forget the graphs."""
        self._largest.clear()

    def is_exceeded_by(self, batch: InputBatch) -> bool:
        """Whether graphs of this decode step's query length are there, but none as
        large.
        """
        if not batch.decode_graph_eligible:
            return False
        num_reqs, num_tokens = batch.num_reqs, batch.num_tokens
        query_len = int(batch.num_scheduled_tokens[:num_reqs].max())
        uniform = num_tokens == num_reqs * query_len
        largest = [
            largest
            for (longest, shorter), largest in self._largest.items()
            if (
                query_len <= longest and not batch.has_prefill
                if shorter
                else query_len == longest and uniform
            )
        ]
        return bool(largest) and all(
            num_reqs > reqs or num_tokens > tokens for reqs, tokens in largest
        )

    def shortfall(self, max_num_seqs: int) -> str | None:
        """What falls short of ``max_num_seqs`` requests, and the remedy; None where
        nothing does, or there are no FULL graphs.
        """
        covered = [
            (min(reqs, tokens // query_len), query_len)
            for (query_len, _), (reqs, tokens) in self._largest.items()
        ]
        reqs, query_len = max(covered, default=(max_num_seqs, 1))
        if reqs >= max_num_seqs:
            return None
        return (
            f"FULL graphs take decode batches of up to {reqs} requests, and "
            f"max_num_seqs is {max_num_seqs}: larger steps run without, counted as "
            f"beyond_graphs; set --max-num-seqs {reqs}, or end "
            f"--cudagraph-capture-sizes with {max_num_seqs * query_len}"
        )
