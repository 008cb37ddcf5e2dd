"""What of the Hopper kernels can be shown without a Hopper."""

import re

import pytest
import torch
from vllm.model_executor.layers.quantization.utils.marlin_utils import (
    marlin_permute_scales,
)
from vllm.model_executor.layers.quantization.utils.marlin_utils_fp8 import (
    mxfp8_marlin_process_scales,
)
from vllm.model_executor.layers.quantization.utils.marlin_utils_test import (
    get_weight_perm,
    marlin_weights,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.hopper import (
    kernels,
    layout,
    ops,
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    return tmp_path / "deepseek_v41_hopper"


def test_they_compile_and_the_second_time_come_from_the_cache(cache, monkeypatch):
    cubin = kernels.compiled()
    assert cubin.startswith(b"\x7fELF")
    for name in kernels.NAMES:
        assert name.encode() in cubin

    def compile_again(source):
        raise AssertionError("compiled twice")

    monkeypatch.setattr(kernels, "_compile", compile_again)
    assert kernels.compiled() == cubin
    assert {path.suffix for path in cache.iterdir()} == {".cubin", ".lock"}


def test_a_source_that_does_not_compile_is_told_with_its_log(cache, tmp_path):
    broken = tmp_path / "broken.cu"
    broken.write_text("void nothing( {")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "SOURCE", broken)
        with pytest.raises(kernels.KernelError, match=r"broken\.cu.*error"):
            kernels.compiled()
    assert not list(cache.glob("*.cubin"))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_layout_is_that_of_marlin(bits):
    size_n, size_k = 192, 96
    codes = torch.randint(0, 2**bits, (size_k, size_n), dtype=torch.int32)
    packed = marlin_weights(codes, size_k, size_n, bits, get_weight_perm(bits))
    found = layout.weight_codes(packed, bits, size_n)
    assert torch.equal(found.int(), codes.T)
    # Experts lie one after another.
    both = layout.weight_codes(torch.stack([packed, packed.flip(0)]), bits, size_n)
    assert torch.equal(both[0], found)
    assert not torch.equal(both[1], found)


def test_the_layout_of_scales_is_that_of_marlin():
    size_n, size_k = 192, 96
    codes = torch.randint(1, 254, (size_n, size_k // 32), dtype=torch.uint8)
    scales = codes.view(torch.float8_e8m0fnu).to(torch.bfloat16).T.contiguous()
    packed = mxfp8_marlin_process_scales(
        marlin_permute_scales(scales, size_k, size_n, 32)
    )
    assert torch.equal(layout.scale_codes(packed.view(torch.uint8)), codes)


def test_dequantised_weights_are_what_their_formats_say():
    codes = torch.arange(16, dtype=torch.int32).repeat(64, 2).T.contiguous()
    packed = marlin_weights(codes, 32, 64, 4, get_weight_perm(4))
    scales = torch.full((1, 64), 128, dtype=torch.uint8)
    weight = layout.dequantized(packed, scales, 4, torch.float64)
    half = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = 2 * torch.tensor([*half, *(-value for value in half)] * 2).double()
    assert torch.equal(weight, expected.expand(64, 32))


@pytest.mark.parametrize("rows", range(1, ops.MAX_ROWS + 1))
def test_k_is_split_into_parts_that_all_warps_have(rows):
    for n, k in [(1792, 5120), (64, 32), (32768, 1280), (5120, 8192), (576, 288)]:
        split = ops.linear_split(rows, n, k)
        assert split in (1, 2, 4, 8)
        assert split == 1 or k // 32 >= 2 * 8 * split


def test_the_more_rows_the_fewer_layers_are_served():
    shapes = [(1792, 5120), (4096, 1280), (5120, 8192), (32768, 1280), (5120, 15360)]
    for n, k in shapes:
        served = [ops.linear_is_faster(rows, n, k) for rows in range(1, 65)]
        assert served == sorted(served, reverse=True)
    assert ops.linear_is_faster(64, 1792, 5120)
    assert not ops.linear_is_faster(64, 32768, 1280)


def test_arguments_are_laid_out_as_the_source_has_them():
    """Field by field, as the driver copies them whole."""
    source = kernels.SOURCE.read_text()
    for name, structure in (
        ("LinearArgs", ops._LinearArgs),
        ("GroupedLinearArgs", ops._GroupedLinearArgs),
        ("Routing", ops._Routing),
        ("GateUpArgs", ops._GateUpArgs),
        ("DownArgs", ops._DownArgs),
        ("SumArgs", ops._SumArgs),
    ):
        body = re.search(rf"struct {name} {{\n(.*?)\n}};", source, re.DOTALL)[1]
        code = re.sub(r"//.*", "", body)
        fields = [
            word.strip(" *")
            for line in code.split(";")
            if line.strip()
            for word in line.rsplit(None, line.count(",") + 1)[-(line.count(",") + 1) :]
        ]
        assert [field.strip(" *,") for field in fields] == [
            field for field, _ in structure._fields_
        ], name
