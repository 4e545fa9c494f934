//! A backend that implements the contract alone, without test kernels.

#[macro_use]
#[path = "../support/delegate.rs"]
mod delegate;

use std::sync::Arc;

use device_ipc_core::backend::{
    BackendInfo, Capabilities, DeviceEvent, DeviceIpc, DeviceMemory, Exported, Extent, HandleKind,
    HandleKindInfo, Opened, ReceivedHandle,
};
use device_ipc_core::{Access, DeviceInfo, DeviceOrdinal, DeviceRange, Error, Ipc, Result};
use device_ipc_mock::MockBackend;

/// The mock without test kernels.
#[derive(Debug)]
struct WithoutTestKernels {
    mock: Arc<MockBackend>,
}

impl DeviceIpc for WithoutTestKernels {
    delegate!(info devices visible_devices_variable peer_access capabilities handle_kinds extents_of export);
    delegate!(unexport open close create_event open_event synchronize_device memory);
}

#[test]
fn add_without_test_kernels_is_unsupported() {
    let mock = MockBackend::from_spec("devices=1").expect("the specification is valid");
    let ipc = Ipc::with_backend(Arc::new(WithoutTestKernels { mock }));
    let stream = ipc.create_stream(0).expect("a stream");
    let buffer = ipc.allocate(0, 16).expect("a buffer");
    let mut view = buffer.view_mut::<f32, _>(&stream).expect("a view of 4 floats");
    view.copy_from(&[1.0; 4]).expect("a copy needs no test kernel");
    let error = view.add(1.0).expect_err("the backend has no test kernels");
    assert!(matches!(error, Error::Unsupported { backend: "mock", .. }), "{error:?}");
    assert!(error.to_string().contains("TestKernels"), "{error}");
    assert_eq!(view.to_vec().expect("readable"), [1.0; 4]);
}
