use proptest::prelude::*;
use proptest::strategy::ValueTree;

use super::*;
use crate::model::tensor::{Dtype, TensorLayout, TensorTable};
use crate::wire::descriptor::arbitrary::descriptor;
use crate::wire::descriptor::{Descriptor, Tensors};

proptest! {
    #[test]
    fn descriptor_has_the_layout_of_itself_and_of_other_exports(known in descriptor(), exporter in descriptor()) {
        let other = known.with(|contents| {
            contents.exporter = exporter.contents().exporter;
            contents.broker = exporter.contents().broker.clone();
            for part in contents.parts.iter_mut() {
                part.home = exporter.home();
                part.export = exporter.export();
                part.ready = !part.ready;
            }
        });
        prop_assert_eq!(check_same_layout(known.contents(), known.contents()), Ok(()));
        prop_assert_eq!(check_same_layout(known.contents(), other.contents()), Ok(()));
    }
}

/// The descriptor of named tensors, of which `change` changes the last of two.
fn changed(of: &Descriptor, change: impl FnOnce(&mut String, &mut u64, &mut TensorLayout)) -> Descriptor {
    let (mut name, mut offset) = ("b".to_owned(), 64);
    let mut layout = contiguous(Dtype::F32, &[2, 4]);
    change(&mut name, &mut offset, &mut layout);
    let first = ("a".to_owned(), 0, contiguous(Dtype::U8, &[16]));
    let table = TensorTable::new([first, (name, offset, layout)]).unwrap();
    of.with(|contents| contents.memory = Memory::Tensors(Tensors::new(table, vec![0, 0]).into()))
}

fn contiguous(dtype: Dtype, shape: &[u64]) -> TensorLayout {
    TensorLayout::contiguous(dtype, shape).unwrap()
}

#[test]
fn first_difference_is_named() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let any = descriptor().new_tree(&mut runner).unwrap().current();
    let known = changed(&any, |_, _, _| {});
    let difference = |found: &Descriptor| match check_same_layout(known.contents(), found.contents()) {
        Err(LayoutError::Differs { what, expected, found }) => format!("{what}: {expected} {found}"),
        other => panic!("{other:?}"),
    };
    let name = changed(&any, |name, _, _| *name = "c".into());
    assert_eq!(difference(&name), "the name of tensor 1: \"b\" \"c\"");
    let dtype = changed(&any, |_, _, layout| *layout = contiguous(Dtype::I32, &[2, 4]));
    assert_eq!(difference(&dtype), "the element type of the tensor \"b\": float32 int32");
    let shape = changed(&any, |_, _, layout| *layout = contiguous(Dtype::F32, &[4, 2]));
    assert_eq!(difference(&shape), "the shape of the tensor \"b\": [2, 4] [4, 2]");
    let strides = changed(&any, |_, _, layout| {
        *layout = TensorLayout::strided(Dtype::F32, [2, 4], [1, 2]).unwrap();
    });
    assert_eq!(difference(&strides), "the strides of the tensor \"b\": [4, 1] [1, 2]");
    let offset = changed(&any, |_, offset, _| *offset = 128);
    assert_eq!(difference(&offset), "the offset in its region of the tensor \"b\": 64 128");
    let fewer = known.with(|contents| contents.memory = Memory::Tensors(Tensors::default().into()));
    assert_eq!(difference(&fewer), "the number of tensors: 2 0");
}
