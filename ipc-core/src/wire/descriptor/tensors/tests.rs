use super::*;
use crate::model::tensor::{Dtype, TensorLayout};

fn tensors() -> Tensors {
    let layout = TensorLayout::contiguous(Dtype::U8, [16]).unwrap();
    let table = TensorTable::new([("a", 0, layout.clone()), ("b", 16, layout)]).unwrap();
    Tensors::new(table, vec![0, 1])
}

fn read(
    recent: &Recent<Read>,
    region_bytes: [u64; 2],
    bytes: &[u8],
) -> Result<Arc<Tensors>, DescriptorError> {
    let mut body = bytes;
    let read = Tensors::read_or_find(recent, 2, region_bytes.into(), &mut body)?;
    assert!(body.is_empty(), "it was passed over");
    Ok(read)
}

#[test]
fn equal_bytes_with_equal_regions_are_decoded_once() {
    let (recent, written) = (Recent::new(), tensors());
    let first = read(&recent, [16, 32], written.bytes()).unwrap();
    assert_eq!(*first, written);
    assert_eq!((first.table(), first.regions()), (written.table(), written.regions()));
    let again = read(&recent, [16, 32], written.bytes()).unwrap();
    assert!(Arc::ptr_eq(&first, &again));
}

#[test]
fn remembered_list_is_checked_against_new_regions() {
    let (recent, written) = (Recent::new(), tensors());
    read(&recent, [16, 32], written.bytes()).unwrap();
    let smaller = read(&recent, [16, 31], written.bytes());
    assert!(matches!(smaller, Err(DescriptorError::Tensor { name, .. }) if name == "b"));
    let larger = read(&recent, [16, 64], written.bytes()).unwrap();
    assert_eq!(*larger, written);
}

#[test]
fn changed_byte_is_another_list() {
    let (recent, written) = (Recent::new(), tensors());
    let first = read(&recent, [64, 64], written.bytes()).unwrap();
    for at in 0..written.bytes().len() {
        let mut changed = written.bytes().to_vec();
        changed[at] ^= 1;
        let mut body = changed.as_slice();
        if let Ok(read) = Tensors::read_or_find(&recent, 2, vec![64, 64], &mut body) {
            assert!(!Arc::ptr_eq(&read, &first) && *read != *first, "byte {at}");
        }
    }
    let mut one = written.bytes();
    let fewer = Tensors::read_or_find(&recent, 1, vec![64, 64], &mut one).unwrap();
    assert_eq!((fewer.table().len(), one.is_empty()), (1, false), "fewer tensors of the same bytes");
}
