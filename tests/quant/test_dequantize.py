"""native/quant against the gguf package: the table, decode, the int8 form, encode."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T

from reflex_worker import _testing

from . import blocks as qb

PACKED = sorted(qb.HALVES)
PLAIN = [T.F32, T.F16, T.BF16]
OTHER = [T.Q8_1, T.Q8_K, T.I8, T.I16, T.I32, T.I64, T.F64]
IDS = {id_: name for name, id_, *_ in _testing.quant_types()}


def name_of(type_id: int) -> str:
    return IDS[type_id]


def dequantize(type_id: int, row: qb.Bytes) -> qb.Floats:
    return np.frombuffer(_testing.quant_dequantize(type_id, row.tobytes()), np.float32)


def assert_same_bits(ours: qb.Floats, reference: qb.Floats) -> None:
    """Equal bit for bit, signs of zero included; a NaN matches any NaN."""
    assert ours.shape == reference.shape
    nan = np.isnan(reference)
    assert np.array_equal(np.isnan(ours), nan)
    differ = (ours.view(np.uint32) != reference.view(np.uint32)) & ~nan
    assert not differ.any(), (
        f"{differ.sum()} values differ, the first at {int(differ.argmax())}: "
        f"{ours[differ][0]!r}, expected {reference[differ][0]!r}"
    )


# ---- the table ---------------------------------------------------------------------------


def test_table_agrees_with_the_gguf_package():
    ours = {id_: (name, (values, size)) for name, id_, values, size, _ in _testing.quant_types()}
    for type_ in T:
        assert ours.pop(type_) == (type_.name, gguf.GGML_QUANT_SIZES[type_])
    assert ours == {qb.Q2_0: ("Q2_0", (64, 18))}


def test_find_knows_exactly_the_lines_of_the_table():
    for name, id_, values, size, kind in _testing.quant_types():
        assert _testing.quant_find(id_) == (name, id_, values, size, kind != "other")
    for id_ in {*range(64), 1 << 31, (1 << 32) - 1} - set(IDS):
        assert _testing.quant_find(id_) is None


def test_every_type_is_covered_here():
    kinds = {id_: kind for _, id_, _, _, kind in _testing.quant_types()}
    assert {i for i, k in kinds.items() if k == "packed"} == set(PACKED)
    assert {i for i, k in kinds.items() if k == "plain"} == set(PLAIN)
    assert {i for i, k in kinds.items() if k == "other"} == set(OTHER)


def test_gguf_package_decodes_no_type_that_we_do_not():
    can = {T.F32, T.F16, *gguf.quants._type_traits} - {T.Q8_1, T.Q8_K}
    assert can <= {*PACKED, *PLAIN}


# ---- decode ------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", ["sane", "wild"])
@pytest.mark.parametrize("type_id", PACKED, ids=name_of)
def test_decode_is_byte_exact_with_gguf(type_id: int, scales: str):
    rng = np.random.default_rng([type_id, scales == "wild"])
    for n_blocks in [*range(1, 10), 300]:
        blocks = qb.random_blocks(rng, type_id, n_blocks, wild=scales == "wild")
        assert_same_bits(dequantize(type_id, blocks), qb.reference(type_id, blocks).ravel())


@pytest.mark.parametrize("type_id", PACKED, ids=name_of)
def test_decode_of_all_zero_and_all_one_bytes(type_id: int):
    for byte in (0x00, 0xFF):
        blocks = np.full((2, qb.sizes(type_id)[1]), byte, np.uint8)
        assert_same_bits(dequantize(type_id, blocks), qb.reference(type_id, blocks).ravel())


@pytest.mark.parametrize("type_id", [T.F16, T.BF16], ids=name_of)
def test_every_16_bit_float_decodes_as_in_gguf(type_id: int):
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    reference = gguf.quants.dequantize(halves.reshape(1, -1), T(type_id)).ravel()
    assert_same_bits(dequantize(type_id, halves), reference)


def test_f32_is_copied():
    bits = np.random.default_rng(0).integers(0, 1 << 32, 4096, dtype=np.uint32)
    assert np.array_equal(dequantize(T.F32, bits.view(np.uint8)).view(np.uint32), bits)


@pytest.mark.parametrize("e", range(256))
def test_mxfp4_every_exponent(e: int):
    block = np.array([[e, *range(0, 256, 16), *range(16)]], np.uint8)[:, :17]
    assert_same_bits(dequantize(T.MXFP4, block), qb.reference(T.MXFP4, block).ravel())


def test_nvfp4_every_scale_byte():
    rng = np.random.default_rng(7)
    blocks = qb.random_blocks(rng, T.NVFP4, 64)
    blocks[:, :4] = np.arange(256, dtype=np.uint8).reshape(64, 4)
    assert_same_bits(dequantize(T.NVFP4, blocks), qb.reference(T.NVFP4, blocks).ravel())


def test_empty_row_decodes_to_nothing():
    for type_id in [*PACKED, *PLAIN]:
        assert _testing.quant_dequantize(type_id, b"") == b""


@pytest.mark.parametrize("type_id", OTHER, ids=name_of)
def test_types_without_weights_are_refused_by_name(type_id: int):
    with pytest.raises(_testing.Error, match=T(type_id).name) as error:
        _testing.quant_dequantize(type_id, b"")
    assert error.value.kind == "unsupported"


# ---- the int8 form -----------------------------------------------------------------------


@pytest.mark.parametrize("scales", ["sane", "wild"])
@pytest.mark.parametrize("type_id", PACKED, ids=name_of)
def test_int8_form_rounds_to_the_decoded_bits(type_id: int, scales: str):
    rng = np.random.default_rng([type_id, scales == "wild", 8])
    for n_blocks in [*range(1, 10), 100]:
        blocks = qb.random_blocks(rng, type_id, n_blocks, wild=scales == "wild")
        n = n_blocks * qb.sizes(type_id)[0]
        q, scale, minimum = _testing.quant_unpack_int8(type_id, blocks.tobytes())
        q = np.frombuffer(q, np.int8).astype(np.float32).reshape(n // 16, 16)
        scale = np.frombuffer(scale, np.float32).reshape(n // 16, 1)
        assert abs(q).max() <= (128 if type_id == T.Q8_0 else 127)
        with np.errstate(all="ignore"):
            value = scale * q
            if minimum is not None:
                value = value + np.frombuffer(minimum, np.float32).reshape(n // 16, 1)
        assert_same_bits(value.ravel(), qb.reference(type_id, blocks).ravel())


def test_types_with_an_offset():
    blocks = {i: np.zeros((1, qb.sizes(i)[1]), np.uint8).tobytes() for i in PACKED}
    with_min = {i for i in PACKED if _testing.quant_unpack_int8(i, blocks[i])[2] is not None}
    assert with_min == {T.Q4_1, T.Q5_1, T.Q2_K, T.Q4_K, T.Q5_K}


@pytest.mark.parametrize("type_id", [*PLAIN, *OTHER], ids=name_of)
def test_floats_and_integers_have_no_int8_form(type_id: int):
    assert _testing.quant_unpack_int8(type_id, b"") is None


# ---- encode ------------------------------------------------------------------------------

ENCODED = [T.F32, T.F16, T.BF16, T.Q8_0, T.Q4_0]


@pytest.mark.parametrize("type_id", ENCODED, ids=name_of)
@pytest.mark.parametrize("magnitude", [0.0, 1e-6, 0.02, 1.0, 300.0])
def test_encode_is_byte_exact_with_gguf(type_id: int, magnitude: float):
    rng = np.random.default_rng([type_id, int(magnitude * 100)])
    x = (rng.standard_normal((64, 96)) * magnitude).astype(np.float32)
    x[::7] = np.round(x[::7])  # ties
    x[::5, :32] = 0
    with np.errstate(all="ignore"):
        reference = gguf.quants.quantize(x, T(type_id)).tobytes()
    assert _testing.quant_quantize(type_id, x.tobytes()) == reference


def test_encode_refuses_what_it_cannot():
    with pytest.raises(_testing.Error, match="Q6_K") as error:
        _testing.quant_quantize(T.Q6_K, np.zeros(256, np.float32).tobytes())
    assert error.value.kind == "unsupported"
    with pytest.raises(_testing.Error, match="33 values") as error:
        _testing.quant_quantize(T.Q8_0, np.zeros(33, np.float32).tobytes())
    assert error.value.kind == "invalid_input"


# ---- generated code ----------------------------------------------------------------------


def test_committed_grids_are_what_the_generator_writes():
    folder = Path(__file__).resolve().parents[2] / "native/quant"
    written = subprocess.run(
        [sys.executable, folder / "make_iq_grids.py"], capture_output=True, text=True, check=True
    )
    assert written.stdout == (folder / "iq_grids.h").read_text()
