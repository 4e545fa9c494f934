//! Element types in DLPack and in `__cuda_array_interface__`.

use device_ipc::Dtype;

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DlDtype {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
}

/// Element types, their DLPack type codes and bits, and their `typestr` where `__cuda_array_interface__` has one.
const TYPES: &[(Dtype, u8, u8, Option<&str>)] = &[
    (Dtype::I8, 0, 8, Some("|i1")),
    (Dtype::I16, 0, 16, Some("<i2")),
    (Dtype::I32, 0, 32, Some("<i4")),
    (Dtype::I64, 0, 64, Some("<i8")),
    (Dtype::U8, 1, 8, Some("|u1")),
    (Dtype::U16, 1, 16, Some("<u2")),
    (Dtype::U32, 1, 32, Some("<u4")),
    (Dtype::U64, 1, 64, Some("<u8")),
    (Dtype::F16, 2, 16, Some("<f2")),
    (Dtype::F32, 2, 32, Some("<f4")),
    (Dtype::F64, 2, 64, Some("<f8")),
    (Dtype::BF16, 4, 16, None),
    (Dtype::COMPLEX32, 5, 32, None),
    (Dtype::COMPLEX64, 5, 64, Some("<c8")),
    (Dtype::COMPLEX128, 5, 128, Some("<c16")),
    (Dtype::BOOL, 6, 8, Some("|b1")),
    (Dtype::F8_E4M3FN, 10, 8, None),
    (Dtype::F8_E4M3FNUZ, 11, 8, None),
    (Dtype::F8_E5M2, 12, 8, None),
    (Dtype::F8_E5M2FNUZ, 13, 8, None),
    (Dtype::F8_E8M0FNU, 14, 8, None),
];

/// Returns the DLPack type, or `None` for a type that DLPack does not have.
pub(crate) fn to_dlpack(dtype: Dtype) -> Option<DlDtype> {
    let (_, code, bits, _) = TYPES.iter().find(|(known, ..)| *known == dtype)?;
    Some(DlDtype { code: *code, bits: *bits, lanes: 1 })
}

/// Returns the element type of a DLPack type.
pub(crate) fn from_dlpack(found: DlDtype) -> Option<Dtype> {
    let is_found = |(_, code, bits, _): &&(Dtype, u8, u8, Option<&str>)| {
        (*code, *bits, 1) == (found.code, found.bits, found.lanes)
    };
    TYPES.iter().find(is_found).map(|(dtype, ..)| *dtype)
}

/// Returns whether elements of this type are complex numbers, or the parts of complex numbers of PyTorch.
pub(crate) fn is_part_of_complex(dtype: DlDtype) -> bool {
    matches!((dtype.code, dtype.bits), (2, 16 | 32 | 64)) || is_complex(dtype)
}

pub(crate) const fn is_complex(dtype: DlDtype) -> bool {
    dtype.code == 5
}

/// Returns the `typestr` of `__cuda_array_interface__`, or `None` for a type that it does not have.
pub(crate) fn to_typestr(dtype: Dtype) -> Option<&'static str> {
    TYPES.iter().find(|(known, ..)| *known == dtype).and_then(|(.., typestr)| *typestr)
}

/// Returns the element type of a `typestr`.
pub(crate) fn from_typestr(typestr: &str) -> Option<Dtype> {
    let typestr = typestr.strip_prefix('=').map_or_else(|| typestr.to_owned(), |rest| format!("<{rest}"));
    TYPES.iter().find(|(.., known)| *known == Some(typestr.as_str())).map(|(dtype, ..)| *dtype)
}
