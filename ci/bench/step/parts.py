"""The parts of a decode step, in the order of its table."""

from enum import StrEnum

# Of the name of a part's range in a profile.
PREFIX = "part: "


class Part(StrEnum):
    """What a launch is for.

    ``METADATA`` is all that comes before the forward: inputs, block tables and
    attention metadata, wherever they are built. ``QUERY`` goes from the attention's
    input to its query and the insertion of its key, ``INDEXER`` has the compressed
    keys too. ``DRAFT`` is the whole of a speculator's work. ``OTHER`` is what has no
    part: its launches are listed by name.
    """

    @property
    def range(self) -> str:
        """The name of its range in a profile."""
        return PREFIX + self

    METADATA = "metadata"
    QUERY = "query"
    INDEXER = "indexer"
    ATTENTION = "attention"
    OUTPUT = "output"
    MHC = "mHC"
    ROUTER = "router"
    EXPERTS = "experts"
    SHARED_EXPERT = "shared expert"
    LM_HEAD = "lm_head"
    SAMPLING = "sampling"
    DRAFT = "draft"
    OTHER = "other"
