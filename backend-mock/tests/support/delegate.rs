//! Delegation to the mock, for backends that change some of its calls.

/// Implements the named methods of `DeviceIpc` by calls of `self.mock`.
macro_rules! delegate {
    ($($method:ident)*) => { $(delegate!(@ $method);)* };
    (@ info) => { fn info(&self) -> &BackendInfo { self.mock.info() } };
    (@ devices) => { fn devices(&self) -> Result<Vec<DeviceInfo>> { self.mock.devices() } };
    (@ visible_devices_variable) => {
        fn visible_devices_variable(&self) -> &'static str { self.mock.visible_devices_variable() }
    };
    (@ peer_access) => {
        fn peer_access(&self, from: DeviceOrdinal, to: DeviceOrdinal) -> Result<bool> {
            self.mock.peer_access(from, to)
        }
    };
    (@ capabilities) => {
        fn capabilities(&self, device: DeviceOrdinal) -> Result<Capabilities> {
            self.mock.capabilities(device)
        }
    };
    (@ handle_kinds) => { fn handle_kinds(&self) -> Vec<HandleKindInfo> { self.mock.handle_kinds() } };
    (@ extents_of) => {
        fn extents_of(&self, range: DeviceRange, stated_base: Option<DeviceRange>) -> Result<Vec<Extent>> {
            self.mock.extents_of(range, stated_base)
        }
    };
    (@ export) => {
        fn export(&self, extent: &Extent, kind: Option<HandleKind>) -> Result<Exported> {
            self.mock.export(extent, kind)
        }
    };
    (@ unexport) => {
        fn unexport(&self, exported: Exported) -> Result<()> { self.mock.unexport(exported) }
    };
    (@ open) => {
        fn open(&self, handles: Vec<ReceivedHandle>, on: DeviceOrdinal, access: Access) -> Result<Opened> {
            self.mock.open(handles, on, access)
        }
    };
    (@ close) => { fn close(&self, opened: Opened) -> Result<()> { self.mock.close(opened) } };
    (@ create_event) => {
        fn create_event(&self, device: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>> {
            self.mock.create_event(device)
        }
    };
    (@ open_event) => {
        fn open_event(&self, handle: &[u8], on: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>> {
            self.mock.open_event(handle, on)
        }
    };
    (@ synchronize_device) => {
        fn synchronize_device(&self, device: DeviceOrdinal) -> Result<()> {
            self.mock.synchronize_device(device)
        }
    };
    (@ memory) => { fn memory(&self) -> &dyn DeviceMemory { self.mock.memory() } };
    (@ timelines) => { fn timelines(&self) -> Option<&dyn DeviceTimelines> { self.mock.timelines() } };
    (@ test_kernels) => { fn test_kernels(&self) -> Option<&dyn TestKernels> { self.mock.test_kernels() } };
}
