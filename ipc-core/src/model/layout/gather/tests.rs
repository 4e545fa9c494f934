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
