"""Element types of flat buffers and of segment values."""

from __future__ import annotations

from enum import StrEnum


class DType(StrEnum):
    """An element type; its value is its name in the IR's text.

    ``f8_e4m3`` has 4 bits of exponent and 3 of mantissa, NaN and no infinities: torch's ``float8_e4m3fn``. It stores
    frozen weights; operators convert it to another type before they compute.
    """

    F64 = "f64"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    F8_E4M3 = "f8_e4m3"
    I64 = "i64"
    I32 = "i32"
    I16 = "i16"
    I8 = "i8"
    U8 = "u8"
    BOOL = "bool"

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE_BYTES[self]

    @property
    def is_floating(self) -> bool:
        """Whether elements are floating-point numbers."""
        return self in _FLOATING

    @property
    def is_low_precision(self) -> bool:
        """Whether elements are 16-bit floats, whose parameters need an FP32 master copy."""
        return self in (DType.F16, DType.BF16)


_ITEMSIZE_BYTES = {
    DType.F64: 8,
    DType.F32: 4,
    DType.F16: 2,
    DType.BF16: 2,
    DType.F8_E4M3: 1,
    DType.I64: 8,
    DType.I32: 4,
    DType.I16: 2,
    DType.I8: 1,
    DType.U8: 1,
    DType.BOOL: 1,
}
_FLOATING = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16, DType.F8_E4M3})
