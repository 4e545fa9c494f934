use proptest::prelude::*;

use super::*;
use crate::model::layout::Dtype;

/// The elements by the definition of [`TensorLayout`].
fn one_by_one(layout: &TensorLayout, source: &[u8]) -> Vec<u8> {
    let element = layout.dtype().bytes().unwrap() as usize;
    let mut gathered = Vec::new();
    for number in 0..layout.elements() {
        let mut rest = number;
        let mut at = 0;
        for (size, stride) in layout.shape().iter().zip(layout.strides()).rev() {
            at += (rest % size) * stride;
            rest /= size;
        }
        let at = at as usize * element;
        gathered.extend_from_slice(&source[at..at + element]);
    }
    gathered
}

fn gathered(layout: &TensorLayout) -> (Vec<u8>, Vec<u8>) {
    let source: Vec<u8> = (0..layout.span_bytes()).map(|byte| (byte * 7 % 251) as u8).collect();
    let element = layout.dtype().bytes().unwrap();
    let mut target = vec![0; (layout.elements() * element) as usize];
    layout.gather(&source, &mut target);
    (target, one_by_one(layout, &source))
}

#[test]
fn transposed_elements_are_gathered_in_row_major_order() {
    let layout = TensorLayout::strided(Dtype::U8, [2, 3], [1, 2]).unwrap();
    let mut target = [0; 6];
    layout.gather(&[10, 11, 12, 13, 14, 15], &mut target);
    assert_eq!(target, [10, 12, 14, 11, 13, 15]);
}

#[test]
fn contiguous_scalar_and_empty_tensors_are_copied() {
    for shape in [&[2, 3][..], &[], &[1, 1], &[0, 5], &[7]] {
        let (found, expected) = gathered(&TensorLayout::contiguous(Dtype::F32, shape).unwrap());
        assert_eq!(found, expected, "{shape:?}");
    }
}

#[test]
fn repeated_elements_are_bounded() {
    let repeated = |size, stride: &[u64]| {
        let layout = TensorLayout::strided(Dtype::F32, [size, 20], [stride, &[1]].concat()).unwrap();
        layout.gathered_bytes()
    };
    assert_eq!(repeated(1000, &[0]), Ok(80_000));
    for size in [1 << 30, 1 << 40, 1 << 57] {
        // By a stride of 0, or by rows that overlap.
        assert!(matches!(repeated(size, &[0]), Err(LayoutError::Repeated { memory: 80, .. })), "{size}");
        assert!(matches!(repeated(size, &[1]), Err(LayoutError::Repeated { .. })), "{size}");
        // Elements with memory of their own are not repeated.
        assert_eq!(repeated(size, &[20]), Ok(80 * size));
    }
    assert_eq!(TensorLayout::strided(Dtype::F32, [1 << 60, 0], [0, 0]).unwrap().gathered_bytes(), Ok(0));
}

#[test]
fn dense_elements_have_no_gaps_and_nothing_in_common() {
    let is_dense = |shape: &[u64], strides: &[u64]| {
        TensorLayout::strided(Dtype::F32, shape, strides).unwrap().is_dense()
    };
    assert!(is_dense(&[2, 3], &[3, 1]) && is_dense(&[2, 3], &[1, 2]) && is_dense(&[2, 1, 3], &[1, 9, 2]));
    assert!(is_dense(&[0, 3], &[7, 7]) && is_dense(&[], &[]));
    assert!(!is_dense(&[2, 3], &[4, 1]) && !is_dense(&[2, 3], &[0, 1]));
    // As many elements as places between the first and the last, but not each place once.
    assert!(!is_dense(&[2, 2], &[0, 3]));
}

proptest! {
    #[test]
    fn gathered_elements_are_those_of_the_indices(
        dimensions in prop::collection::vec((0_u64..5, 0_u64..9), 0..5),
        dtype in prop::sample::select(vec![Dtype::U8, Dtype::BF16, Dtype::F32, Dtype::COMPLEX128]),
    ) {
        let (shape, strides): (Vec<_>, Vec<_>) = dimensions.into_iter().unzip();
        let (found, expected) = gathered(&TensorLayout::strided(dtype, shape, strides).unwrap());
        prop_assert_eq!(found, expected);
    }
}
