//! An importer process.

use device_ipc_ascend::AscendBackend;
use device_ipc_core::backend::{
    DeviceIpc, DeviceMemory, Exported, HandleBytes, HandleKind, Opened, ReceivedHandle, TestKernels,
};
use device_ipc_core::{Access, DeviceOrdinal, ProcessIdentity, Result};
use device_ipc_test_process::{Process, hex, serve, unhex};

use super::memory::{ZERO, backend, pattern, read, write};
use super::support::{Raw, Role};

/// Returns a handle as if received from another process.
pub(crate) fn received(
    kind: HandleKind,
    bytes: Vec<u8>,
    size: u64,
    home: Option<DeviceOrdinal>,
) -> ReceivedHandle {
    let exporter = ProcessIdentity::current().expect("this process has an identity");
    let bytes = HandleBytes::new(bytes);
    ReceivedHandle {
        kind,
        bytes,
        fds: Vec::new(),
        size,
        generation: None,
        home,
        home_identity: None,
        exporter,
    }
}

/// Serves requests to open, read and close memory with the backend alone: `id`, `open KIND HEX SIZE HOME ON` (several
/// `KIND HEX SIZE` with commas), `read`, `write BYTE`, `fill BYTE`, `add VALUE`, `copy`, `close`, `calls NAME`.
pub(crate) fn importer() {
    let backend = backend();
    let raw = Raw::open();
    let mut open: Vec<Opened> = Vec::new();
    let stream = |device| backend.create_stream(device).expect("a stream");
    serve(|command, arguments| {
        let words: Vec<&str> = [command].into_iter().chain(arguments.split_whitespace()).collect();
        let last = open.last().map(|opened| opened.range);
        let answer = |result: Result<String>| match result {
            Ok(text) => format!("ok {text}"),
            Err(error) => format!("err {error:?} {error}"),
        };
        match (words.as_slice(), last) {
            (["id"], _) => hex(&backend.local_peer_id(ZERO).expect("an id")),
            (["calls", name], _) => raw.calls(name).to_string(),
            (["open", handles, home, on], _) => {
                let home = home.parse().ok().map(DeviceOrdinal::new);
                let handles = handles.split(',').map(|handle| {
                    let parts: Vec<&str> = handle.split(':').collect();
                    let kind = HandleKind(parts[0].parse().expect("a number"));
                    received(kind, unhex(parts[1]), parts[2].parse().expect("a number"), home)
                });
                let on = DeviceOrdinal::new(on.parse().expect("a number"));
                answer(backend.open(handles.collect(), on, Access::ReadWrite).map(|opened| {
                    let text = format!("{} {}", opened.range.ptr.get(), opened.range.len);
                    open.push(opened);
                    text
                }))
            }
            (["read"], Some(range)) => answer(
                read(&backend, range, &*stream(range.device)).map(|bytes| hex(&bytes[..64.min(bytes.len())])),
            ),
            (["whole"], Some(range)) => {
                let bytes = read(&backend, range, &*stream(range.device)).expect("it can be read");
                (bytes == pattern(bytes.len())).to_string()
            }
            (["pattern"], Some(range)) => {
                let bytes = pattern(range.len as usize);
                answer(write(&backend, range, &bytes, &*stream(range.device)).map(|()| String::new()))
            }
            (["fill", byte], Some(range)) => {
                let stream = stream(range.device);
                let byte = byte.parse().expect("a byte");
                // SAFETY: the range is mapped.
                let filled = unsafe { backend.fill(range, byte, stream.as_borrowed()) };
                answer(
                    filled.and_then(|()| backend.synchronize(stream.as_borrowed())).map(|()| String::new()),
                )
            }
            (["add", value], Some(range)) => {
                let stream = stream(range.device);
                let value = value.parse().expect("a number");
                // SAFETY: the range is mapped.
                let added = unsafe { backend.add_f32(range, value, stream.as_borrowed()) };
                answer(added.and_then(|()| backend.synchronize(stream.as_borrowed())).map(|()| String::new()))
            }
            (["copy"], Some(range)) => {
                let stream = stream(range.device);
                let copy = backend.allocate(range.device, range.len).expect("memory");
                // SAFETY: both ranges are mapped.
                let copied = unsafe { backend.copy(copy, range, stream.as_borrowed()) };
                answer(copied.and_then(|()| read(&backend, copy, &*stream)).map(|bytes| hex(&bytes[..64])))
            }
            (["close"], Some(_)) => {
                let opened = open.pop().expect("one is open");
                answer(backend.close(opened).map(|()| String::new()))
            }
            other => panic!("the importer does not know {other:?}"),
        }
    });
}

/// The role of [`importer`].
pub(crate) const IMPORTER: &[Role] = &[("importer", importer)];

/// Returns the handle in the format of the importer's requests.
pub(crate) fn encode(exported: &Exported) -> String {
    format!("{}:{}:{}", exported.kind.0, hex(exported.bytes.as_slice()), exported.extent.allocation.len)
}

pub(crate) fn encode_all(exports: &[Exported]) -> String {
    exports.iter().map(encode).collect::<Vec<_>>().join(",")
}

/// Lists the importer, and makes it open the handle.
pub(crate) fn open_listed(
    backend: &AscendBackend,
    exported: &Exported,
    peer: &mut Process,
    on: u32,
) -> String {
    backend.authorize(exported, &unhex(&peer.ask("id"))).expect("the importer is listed");
    peer.ask(&format!("open {} 0 {on}", encode(exported)))
}

/// Lists the importer, and makes it open the handle, which must succeed.
#[track_caller]
pub(crate) fn open_expecting_success(
    backend: &AscendBackend,
    exported: &Exported,
    peer: &mut Process,
    on: u32,
) {
    let opened = open_listed(backend, exported, peer, on);
    assert!(opened.starts_with("ok "), "kind {} on device {on}: {opened}", exported.kind.0);
}

/// Makes the importer close its last mapping and exit, and ends the export.
#[track_caller]
pub(crate) fn close_and_unexport(backend: &AscendBackend, exported: Exported, mut peer: Process) {
    assert_eq!(peer.ask("close"), "ok ");
    peer.finish();
    backend.unexport(exported).expect("it goes back");
}
