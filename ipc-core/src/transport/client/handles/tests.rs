use super::*;
use crate::backend::{HandleBytes, HandleKind};
use crate::wire::AllocationId;

fn handles(count: usize, bytes: usize) -> Vec<WireHandle> {
    let handle = |index| WireHandle {
        allocation: AllocationId(index as u64),
        kind: HandleKind(1),
        bytes: HandleBytes::new(vec![0; bytes]),
        fds: 0,
        size: 1,
        generation: None,
    };
    (0..count).map(handle).collect()
}

#[test]
fn handles_beyond_the_maximum_are_rejected() {
    let mut arrived = Arrived::default();
    arrived.add(handles(MAX_HANDLES - 1, 0), ReceivedFds::default()).unwrap();
    arrived.add(handles(1, 0), ReceivedFds::default()).unwrap();
    assert!(matches!(arrived.add(handles(1, 0), ReceivedFds::default()), Err(Error::Protocol(_))));
    assert_eq!(arrived.handles.len(), MAX_HANDLES);
    let mut large = Arrived::default();
    large.add(handles(16, MAX_HANDLE_BYTES / 16), ReceivedFds::default()).unwrap();
    assert!(matches!(large.add(handles(1, 1), ReceivedFds::default()), Err(Error::Protocol(_))));
}
