//! Gathering of the elements of a strided tensor.

use super::TensorLayout;

impl TensorLayout {
    /// Copies the elements to `target` in row-major order, without gaps.
    ///
    /// `source` begins at the first element and ends with the last one; `target` has the bytes of all elements.
    ///
    /// # Panics
    ///
    /// If either length is wrong.
    pub(crate) fn gather(&self, source: &[u8], target: &mut [u8]) {
        if self.is_empty() {
            return;
        }
        let element = self.dtype().bytes().expect("a layout has a known element type") as usize;
        assert_eq!(target.len(), self.elements() as usize * element, "the target has all elements");
        // Dimensions of size 1 have no distance; inner dimensions that are contiguous form one run.
        let mut outer: Vec<(usize, usize)> = self
            .shape()
            .iter()
            .zip(self.strides())
            .filter(|(size, _)| **size > 1)
            .map(|(size, stride)| (*size as usize, *stride as usize * element))
            .collect();
        let mut run = element;
        while let Some(&(size, stride)) = outer.last()
            && stride == run
        {
            run *= size;
            outer.pop();
        }
        let mut index = vec![0; outer.len()];
        let mut start = 0;
        for piece in target.chunks_exact_mut(run) {
            piece.copy_from_slice(&source[start..start + run]);
            for (place, (size, stride)) in index.iter_mut().zip(&outer).rev() {
                *place += 1;
                start += stride;
                if *place < *size {
                    break;
                }
                start -= *place * stride;
                *place = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
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
}
