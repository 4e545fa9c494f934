//! Layouts of tensors against a model that computes in 128 bits.

use crate::{Dtype, LayoutError, TensorLayout};
use proptest::collection::vec;
use proptest::prelude::*;

/// Sizes and strides of all magnitudes: small ones, any, and those around the powers of two.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0_u64..5,
        1 => any::<u64>(),
        3 => (0_u32..64, 0_u64..3).prop_map(|(power, more)| ((1_u64 << power) - 1).saturating_add(more)),
    ]
}

fn dtype() -> impl Strategy<Value = Dtype> {
    proptest::sample::select(Dtype::ALL)
}

/// Bytes up to the end of the last element, or `None` where they, or those of all elements, do not fit 64 bits.
fn span(dtype: Dtype, shape: &[u64], strides: &[u64], offset: u64) -> Option<u64> {
    if shape.contains(&0) {
        return Some(0);
    }
    let element = u128::from(dtype.bytes().unwrap());
    let fits = |elements: u128| u64::try_from(elements.saturating_mul(element)).ok();
    fits(shape.iter().fold(1, |elements: u128, size| elements.saturating_mul(u128::from(*size))))?;
    let reach = |(size, stride): (&u64, &u64)| u128::from(size - 1) * u128::from(*stride);
    fits(shape.iter().zip(strides).map(reach).fold(u128::from(offset) + 1, u128::saturating_add))
}

fn is_contiguous(shape: &[u64], strides: &[u64]) -> bool {
    let mut expected: u128 = 1;
    shape.iter().zip(strides).rev().all(|(&size, &stride)| {
        let fits = size == 1 || u128::from(stride) == expected;
        expected = expected.saturating_mul(u128::from(size.max(1)));
        fits
    })
}

fn check(layout: Result<TensorLayout, LayoutError>, dtype: Dtype, shape: &[u64], strides: &[u64]) {
    let expected = span(dtype, shape, strides, 0);
    match layout {
        Ok(layout) => {
            let span = expected.expect("the model says that it does not fit 64 bits");
            assert_eq!((layout.shape(), layout.strides()), (shape, strides));
            assert_eq!(layout.span_bytes(), span);
            let elements = shape.iter().fold(1, |all: u128, size| all.saturating_mul(u128::from(*size)));
            let elements = if shape.contains(&0) { 0 } else { elements };
            assert_eq!(u128::from(layout.elements()), elements);
            assert!(layout.check_fits(span).is_ok() && layout.check_fits(u64::MAX).is_ok());
            if let Some(less) = span.checked_sub(1) {
                let refused = LayoutError::TooLarge { needed: span, region: less };
                assert_eq!(layout.check_fits(less), Err(refused));
            }
        }
        // A tensor without elements may be refused for its other sizes.
        Err(error) => assert!(
            error == LayoutError::Overflow && (expected.is_none() || shape.contains(&0)),
            "{error} for {shape:?}, {strides:?}"
        ),
    }
}

proptest! {
    // A failure prints its input; the checkout stays as it is.
    #![proptest_config(ProptestConfig { cases: 4096, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn strided_layouts_agree_with_the_model(dtype in dtype(), dimensions in vec((number(), number()), 0..6)) {
        let (shape, strides): (Vec<u64>, Vec<u64>) = dimensions.into_iter().unzip();
        check(TensorLayout::strided(dtype, shape.clone(), strides.clone()), dtype, &shape, &strides);
    }

    #[test]
    fn offsets_agree_with_the_model(
        dtype in dtype(),
        dimensions in vec((0_u64..5, 0_u64..9), 0..4),
        offset in number(),
    ) {
        let (shape, strides): (Vec<u64>, Vec<u64>) = dimensions.into_iter().unzip();
        let layout = TensorLayout::strided(dtype, shape.clone(), strides.clone()).unwrap();
        let start = u64::try_from(u128::from(offset) * u128::from(dtype.bytes().unwrap())).ok();
        let expected = start.zip(span(dtype, &shape, &strides, offset));
        match layout.with_element_offset(offset) {
            Ok(layout) => {
                prop_assert_eq!(expected, Some((layout.start_bytes(), layout.span_bytes())));
                prop_assert_eq!((layout.element_offset(), layout.shape(), layout.strides()), (offset, &*shape, &*strides));
                let span = expected.unwrap().1;
                prop_assert!(layout.check_fits(span).is_ok());
                prop_assert!(span == 0 || layout.check_fits(span - 1).is_err());
            }
            Err(error) => prop_assert!(error == LayoutError::Overflow && expected.is_none(), "{}", error),
        }
    }

    #[test]
    fn contiguous_layouts_agree_with_the_model(dtype in dtype(), shape in vec(number(), 0..6)) {
        let layout = TensorLayout::contiguous(dtype, shape.clone());
        let strides = match &layout {
            Ok(layout) => layout.strides().to_vec(),
            // The model needs none to tell that the elements do not fit.
            Err(_) => vec![0; shape.len()],
        };
        if let Ok(layout) = &layout {
            prop_assert!(layout.is_contiguous() || shape.contains(&0));
        }
        check(layout, dtype, &shape, &strides);
    }

    #[test]
    fn contiguity_agrees_with_the_model(
        dtype in dtype(),
        shape in vec(number(), 0..6),
        other in proptest::option::of((any::<proptest::sample::Index>(), number())),
    ) {
        // Mostly the strides of a contiguous one, so that the comparison goes through all dimensions.
        let mut strides: Vec<u64> = (0..shape.len())
            .map(|at| shape[at + 1..].iter().fold(1, |all: u64, size| all.saturating_mul((*size).max(1))))
            .collect();
        if let Some((at, stride)) = other.filter(|_| !strides.is_empty()) {
            let at = at.index(strides.len());
            strides[at] = stride;
        }
        if let Ok(layout) = TensorLayout::strided(dtype, shape.clone(), strides.clone()) {
            let found = layout.is_contiguous();
            // Of a tensor without elements either may be said.
            let model = if shape.contains(&0) { found } else { is_contiguous(&shape, &strides) };
            prop_assert_eq!(found, model, "{:?} {:?}", shape, strides);
        }
    }

    #[test]
    fn too_many_dimensions_are_rejected(dtype in dtype(), dimensions in 65_usize..100) {
        let refused = Err(LayoutError::TooManyDimensions(dimensions));
        prop_assert_eq!(TensorLayout::contiguous(dtype, vec![1; dimensions]), refused);
    }
}
