use device_ipc_core::{HandleBytes, ProcessIdentity};

use super::*;
use crate::export::pool::HANDLE_BYTES;

pub(super) fn received(kind: HandleKind, len: usize) -> ReceivedHandle {
    let bytes = HandleBytes::new(vec![7; len]);
    let exporter = ProcessIdentity::current().unwrap();
    ReceivedHandle { kind, bytes, fds: Vec::new(), size: 4096, generation: None, home: None, exporter }
}

fn with_fds(mut handle: ReceivedHandle, count: usize) -> ReceivedHandle {
    handle.fds.extend((0..count).map(|_| std::fs::File::open("/dev/null").unwrap().into()));
    handle
}

#[test]
fn handles_that_are_not_of_one_kind_are_refused_before_the_driver_sees_them() {
    assert_eq!(the_kind_of(&[received(POOL, 0), received(POOL, 0)]).unwrap(), POOL);
    assert!(the_kind_of(&[]).unwrap_err().to_string().contains("open 0 handles"));
    let mixed = the_kind_of(&[received(LEGACY, 64), received(VIRTUAL_MEMORY, 0)]).unwrap_err().to_string();
    assert!(mixed.contains("kinds 1 (legacy) and 2 (virtual-memory)"), "{mixed}");
    assert!(the_only_one(&[received(LEGACY, 64)]).is_ok());
    let two = the_only_one(&[received(LEGACY, 64), received(LEGACY, 64)]).map(|_| ()).unwrap_err();
    assert!(two.to_string().contains("open 2 handles"));
}

#[test]
fn parts_of_another_number_are_refused() {
    assert!(parts::<64, 0>(&received(LEGACY, 64)).is_ok());
    assert!(parts::<0, 1>(&with_fds(received(VIRTUAL_MEMORY, 0), 1)).is_ok());
    assert!(parts::<HANDLE_BYTES, 1>(&with_fds(received(POOL, 81), 1)).is_ok());
    let refused = |handle: &ReceivedHandle| parts::<64, 0>(handle).map(|_| ()).unwrap_err().to_string();
    for len in [0, 1, 63, 65, 4096] {
        let error = refused(&received(LEGACY, len));
        assert!(error.contains(&format!("legacy has 64 bytes, and {len} came")), "{error}");
    }
    let error = refused(&with_fds(received(FABRIC, 64), 1));
    assert!(error.contains("fabric has 0 file descriptors, and 1 came"), "{error}");
}

#[test]
fn a_refusal_of_read_only_names_the_kinds_that_can() {
    for kind in [LEGACY, POOL] {
        let error = cannot_be_read_only(kind).to_string();
        assert!(error.contains(kinds::name(kind)) && error.contains("kind 2 (virtual-memory) or 4 (fabric)"));
    }
}
