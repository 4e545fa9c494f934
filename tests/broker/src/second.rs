//! A second copy of the library in one process: this crate is a shared library too, with statics of its own.
//!
//! Why: an extension module of Python brings its own copy along, and a program may load two.

use std::ffi::{CString, c_char, c_void};

use device_ipc_core::Ipc;
use device_ipc_mock::MockBackend;

const ENTRY: &str = "device_ipc_broker_tests_share_by_second_copy";

type Entry = unsafe extern "C" fn(*mut c_char, usize) -> usize;

/// Shares 1024 floats of 1.0 for as long as the process lives, and writes the descriptor's text.
///
/// # Safety
///
/// `text` has room for `room` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn device_ipc_broker_tests_share_by_second_copy(text: *mut c_char, room: usize) -> usize {
    let backend = MockBackend::from_spec("devices=2").expect("a machine");
    let ipc = Ipc::with_backend(backend);
    let (memory, stream) = (ipc.allocate(0, 4096).expect("memory"), ipc.create_stream(0).expect("a stream"));
    let mut view = memory.view_mut::<f32, _>(&stream).expect("a view");
    view.copy_from(&[1.0; 1024]).and_then(|()| stream.synchronize()).expect("it is filled");
    drop(view);
    let export = ipc.share(memory).start().expect("it can be shared");
    let descriptor = export.descriptor().to_string();
    std::mem::forget(export);
    assert!(descriptor.len() <= room, "it fits");
    // SAFETY: there is room, as the caller promises and was asserted.
    unsafe { text.copy_from_nonoverlapping(descriptor.as_ptr().cast(), descriptor.len()) };
    descriptor.len()
}

/// Allocates memory of a mock, which starts no thread of the library.
#[unsafe(no_mangle)]
extern "C" fn device_ipc_broker_tests_use_second_copy() {
    let ipc = Ipc::with_backend(MockBackend::from_spec("devices=1").expect("a machine"));
    drop(ipc.allocate(0, 4096).expect("memory"));
}

/// Loads a second copy, uses it, and closes it. Returns whether it is still loaded.
///
/// # Panics
///
/// Panics if it cannot be loaded or closed.
pub fn second_copy_stays_loaded() -> bool {
    let library = path_of_second_copy();
    // SAFETY: the library is this crate's own, and the function has this type.
    unsafe {
        let opened = libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_DEEPBIND);
        assert!(!opened.is_null(), "the library can be loaded");
        let found = libc::dlsym(opened, c"device_ipc_broker_tests_use_second_copy".as_ptr());
        assert!(!found.is_null(), "it has the entry");
        std::mem::transmute::<*mut c_void, extern "C" fn()>(found)();
        assert_eq!(libc::dlclose(opened), 0, "it can be closed");
        !libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD).is_null()
    }
}

fn path_of_second_copy() -> CString {
    let program = std::env::current_exe().expect("this program");
    let folder = program.parent().expect("it lies in a folder");
    let name = "libdevice_ipc_broker_tests.so";
    let library = [folder.join("deps").join(name), folder.join(name)].into_iter().find(|path| path.exists());
    let library = library.unwrap_or_else(|| panic!("{name} lies beside the agent or under deps/"));
    CString::new(library.into_os_string().into_encoded_bytes()).expect("a path")
}

/// The descriptor of something that a second copy of the library shares in this very process.
pub(crate) fn share_by_second_copy() -> String {
    let library = path_of_second_copy();
    let entry = CString::new(ENTRY).expect("a name");
    let mut text = vec![0_u8; 64 * 1024];
    // SAFETY: the library is this crate's own, and the entry has this type; its symbols bind to itself.
    let len = unsafe {
        let opened = libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_DEEPBIND);
        assert!(!opened.is_null(), "the library can be loaded");
        let found = libc::dlsym(opened, entry.as_ptr());
        assert!(!found.is_null(), "it has the entry");
        let own = device_ipc_broker_tests_share_by_second_copy as *const c_void;
        assert_ne!(found.cast_const(), own, "it is another copy");
        let share: Entry = std::mem::transmute::<*mut c_void, Entry>(found);
        share(text.as_mut_ptr().cast(), text.len())
    };
    text.truncate(len);
    String::from_utf8(text).expect("text")
}
