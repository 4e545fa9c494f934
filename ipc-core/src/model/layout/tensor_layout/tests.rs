use super::*;

#[test]
fn contiguous_layout_spans_its_elements() {
    let layout = TensorLayout::contiguous(Dtype::F32, [4, 5]).unwrap();
    assert_eq!(layout.strides(), [5, 1]);
    assert_eq!(layout.span_bytes(), 80);
    assert_eq!(layout.elements(), 20);
    assert!(layout.is_contiguous());
    assert!(layout.check_fits(80).is_ok());
    assert_eq!(layout.check_fits(79), Err(LayoutError::TooLarge { needed: 80, region: 79 }));
}

#[test]
fn scalar_spans_one_element_and_empty_tensor_none() {
    assert_eq!(TensorLayout::contiguous(Dtype::F64, []).unwrap().span_bytes(), 8);
    assert_eq!(TensorLayout::contiguous(Dtype::F64, [3, 0, 2]).unwrap().span_bytes(), 0);
}

#[test]
fn offset_counts_elements_from_the_region_start() {
    let layout = TensorLayout::contiguous(Dtype::F32, [4, 5]).unwrap().with_element_offset(3).unwrap();
    assert_eq!((layout.element_offset(), layout.start_bytes(), layout.span_bytes()), (3, 12, 92));
    assert!(layout.is_contiguous());
    assert_eq!(layout.check_fits(91), Err(LayoutError::TooLarge { needed: 92, region: 91 }));
    let scalar = |offset| TensorLayout::contiguous(Dtype::F32, []).unwrap().with_element_offset(offset);
    assert_eq!(scalar(u64::MAX / 4), Err(LayoutError::Overflow));
    assert_eq!(scalar(u64::MAX / 4 - 1).unwrap().span_bytes(), u64::MAX - 3);
}

#[test]
fn layout_to_end_covers_whole_elements_only() {
    let to_end = |offset, bytes| TensorLayout::to_end(Dtype::F32, offset, bytes);
    let layout = to_end(3, 80).unwrap();
    assert_eq!((layout.shape(), layout.element_offset(), layout.span_bytes()), ([17].as_slice(), 3, 80));
    assert!(to_end(20, 80).unwrap().is_empty());
    assert_eq!(to_end(21, 80), Err(LayoutError::TooLarge { needed: 84, region: 80 }));
    assert_eq!(to_end(u64::MAX, 80), Err(LayoutError::Overflow));
    for bytes in [1, 79, 81, 83] {
        let error = to_end(0, bytes).unwrap_err();
        assert_eq!(error, LayoutError::NotWholeElements { dtype: Dtype::F32, region: bytes, element: 4 });
        assert!(error.to_string().contains("ShareBuilder::shape"), "{error}");
    }
}

#[test]
fn unaligned_address_is_rejected_with_the_multiple() {
    for (dtype, good, bad) in [(Dtype::F32, 8, 6), (Dtype::F64, 16, 12), (Dtype::BF16, 2, 1)] {
        assert_eq!(check_alignment(dtype, 0), Ok(()));
        assert_eq!(check_alignment(dtype, good), Ok(()));
        let element = dtype.bytes().unwrap();
        let error = check_alignment(dtype, bad).unwrap_err();
        assert_eq!(error, LayoutError::Unaligned { address: bad, element });
        assert!(error.to_string().contains(&format!("a multiple of {element} bytes")), "{error}");
    }
    assert_eq!(check_alignment(Dtype::U8, 1), Ok(()));
}

#[test]
fn transposed_layout_is_not_contiguous() {
    let layout = TensorLayout::strided(Dtype::U8, [4, 5], [1, 4]).unwrap();
    assert!(!layout.is_contiguous());
    assert_eq!(layout.span_bytes(), 20);
}

#[test]
fn oversized_layout_is_rejected_without_overflow() {
    let huge = u64::MAX / 2;
    assert_eq!(TensorLayout::contiguous(Dtype::U8, [huge, 3]), Err(LayoutError::Overflow));
    assert_eq!(TensorLayout::contiguous(Dtype::F32, [huge]), Err(LayoutError::Overflow));
    assert_eq!(TensorLayout::strided(Dtype::U8, [2, 2], [u64::MAX, 1]), Err(LayoutError::Overflow));
    assert_eq!(
        TensorLayout::strided(Dtype::U8, [2], [1, 1]),
        Err(LayoutError::Strides { dimensions: 1, strides: 2 })
    );
    assert_eq!(TensorLayout::contiguous(Dtype::U8, vec![1; 65]), Err(LayoutError::TooManyDimensions(65)));
    assert_eq!(TensorLayout::contiguous(Dtype::from_code(250), [1]), Err(LayoutError::UnknownDtype(250)));
}
