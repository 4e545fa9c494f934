use super::*;

#[test]
fn dtype_names_and_codes_are_unique_and_round_trip() {
    for (index, dtype) in Dtype::ALL.iter().enumerate() {
        let name = dtype.name().unwrap();
        assert_eq!(Dtype::from_name(name), Some(*dtype));
        assert_eq!(Dtype::from_name(&format!("torch.{name}")), Some(*dtype));
        assert_eq!(usize::from(dtype.code()), index + 1, "codes are part of docs/spec/descriptor.md");
        assert!(matches!(dtype.bytes(), Some(1 | 2 | 4 | 8 | 16)));
    }
    assert_eq!((Dtype::from_name("float33"), Dtype::from_name("")), (None, None));
}

/// `torch.dtype.itemsize` of each in PyTorch 2.11.
#[test]
fn elements_have_the_sizes_that_pytorch_gives_them() {
    let named = |names: &str, bytes| {
        for name in names.split(' ') {
            let dtype = Dtype::from_name(name).unwrap_or_else(|| panic!("{name} is missing"));
            assert_eq!(dtype.bytes(), Some(bytes), "{name}");
        }
    };
    named("float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2", 1);
    named("uint8 int8 bool int1 int2 int3 int4 int5 int6 int7", 1);
    named("uint1 uint2 uint3 uint4 uint5 uint6 uint7", 1);
    named("quint8 qint8 quint4x2 quint2x4 bits1x8 bits2x4 bits4x2 bits8", 1);
    named("float16 bfloat16 uint16 int16 bits16", 2);
    named("float32 complex32 uint32 int32 qint32", 4);
    named("float64 complex64 uint64 int64", 8);
    named("complex128", 16);
    assert_eq!(Dtype::ALL.len(), 46);
}

#[test]
fn rust_types_have_their_element_types() {
    assert_eq!(Dtype::of::<u8>(), Some(Dtype::U8));
    assert_eq!(Dtype::of::<i64>(), Some(Dtype::I64));
    assert_eq!((Dtype::of::<Bool>(), Dtype::of::<bool>()), (Some(Dtype::BOOL), Some(Dtype::BOOL)));
    assert_eq!((Dtype::of::<usize>(), Dtype::of::<[f32; 4]>()), (None, None));
}

#[test]
#[cfg(feature = "half")]
fn halves_have_their_element_types() {
    assert_eq!(Dtype::of::<half::f16>(), Some(Dtype::F16));
    assert_eq!(Dtype::of::<half::bf16>(), Some(Dtype::BF16));
}

#[test]
#[cfg(feature = "float8")]
fn float8_types_have_their_element_types() {
    assert_eq!(Dtype::of::<float8::F8E4M3>(), Some(Dtype::F8_E4M3FN));
    assert_eq!(Dtype::of::<float8::F8E5M2>(), Some(Dtype::F8_E5M2));
    // The finite variant of PyTorch: the largest value is 448, and there is no infinity.
    assert_eq!(float8::F8E4M3::from_bits(0x7E).to_f32(), 448.0);
    assert_eq!(float8::F8E5M2::from_bits(0x7C).to_f32(), f32::INFINITY);
}
