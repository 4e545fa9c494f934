//! Concurrent calls of several threads do not deadlock.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use device_ipc_core::DeviceOrdinal;
use device_ipc_core::backend::DeviceMemory;
use device_ipc_cuda::CudaBackend;
use libloading::Library;

use super::support::Installed;

const ROUNDS: usize = 3000;

#[test]
fn stream_destroy_and_free_do_not_deadlock() {
    let installed = Installed::new();
    let backend = CudaBackend::load_from(installed.library()).expect("the simulator");
    let backend = Arc::new(backend);
    let device = DeviceOrdinal::new(0);
    let (done, both) = channel();
    let (of_streams, of_memory) = (Arc::clone(&backend), backend);
    let done_with_streams = done.clone();
    std::thread::spawn(move || {
        for _ in 0..ROUNDS {
            drop(of_streams.create_stream(device).expect("a stream"));
        }
        let _ = done_with_streams.send(());
    });
    std::thread::spawn(move || {
        for _ in 0..ROUNDS {
            let range = of_memory.allocate(device, 4096).expect("memory");
            // SAFETY: no other code has it, and no work was submitted with it.
            unsafe { of_memory.free(range) }.expect("freed");
        }
        let _ = done.send(());
    });
    // Threads in a deadlock are ended with the process.
    for _ in 0..2 {
        both.recv_timeout(Duration::from_secs(60)).expect("both threads come to an end");
    }
}

#[test]
fn concurrent_release_and_retain_keep_context() {
    let installed = Installed::new();
    // SAFETY: the simulator, whose initializers do nothing.
    let driver = Arc::new(unsafe { Library::new(installed.library()) }.expect("the simulator"));
    assert_eq!(call(&driver, "cuInit", 0, 0), 0);
    let (done, both) = channel();
    for _ in 0..2 {
        let (driver, done) = (Arc::clone(&driver), done.clone());
        std::thread::spawn(move || {
            for _ in 0..ROUNDS {
                let (mut context, mut stream) = (0, 0);
                let out = |value: &mut usize| std::ptr::from_mut(value) as usize;
                let made = [
                    call(&driver, "cuDevicePrimaryCtxRetain", out(&mut context), 0),
                    call(&driver, "cuCtxSetCurrent", context, 0),
                    call(&driver, "cuStreamCreate", out(&mut stream), 1),
                    call(&driver, "cuStreamDestroy_v2", stream, 0),
                    call(&driver, "cuDevicePrimaryCtxRelease_v2", 0, 0),
                ];
                if made != [0; 5] {
                    let _ = done.send(Err(made));
                    return;
                }
            }
            let _ = done.send(Ok(()));
        });
    }
    for _ in 0..2 {
        let ended = both.recv_timeout(Duration::from_secs(60)).expect("both threads come to an end");
        assert_eq!(ended, Ok(()), "what each of the calls said");
    }
}

/// Calls a function of the driver with at most two words.
fn call(driver: &Library, name: &str, first: usize, second: usize) -> i32 {
    type Function = unsafe extern "C" fn(usize, usize) -> i32;
    // SAFETY: words, or ints in words, as the functions above take them; their results are valid during the call.
    unsafe { driver.get::<Function>(name.as_bytes()).expect("the simulator has it")(first, second) }
}
