"""Stands in for vLLM's flash-attention where its kernels are not carried.

Imports work, every version is reported as unsupported, and a call says what is
missing.
"""

_REASON = (
    "this bundle carries no flash-attention kernels: "
    "pack it again with bundle.sh --flash-attention"
)


def is_fa_version_supported(fa_version: int) -> bool:
    """No version is."""
    return False


def fa_version_unsupported_reason(fa_version: int) -> str | None:
    """Why not."""
    return _REASON


def flash_attn_varlen_func(*args: object, **kwargs: object) -> None:
    """Raises ``RuntimeError``: there is no kernel to call."""
    raise RuntimeError(_REASON)


compile_flash_attn_varlen_func_from_specs = flash_attn_varlen_func
get_scheduler_metadata = flash_attn_varlen_func
