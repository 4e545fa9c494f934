//! Several threads call the simulator at a time: none waits for another for ever.

mod support;

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use device_ipc_core::{DeviceMemory, DeviceOrdinal};
use device_ipc_cuda::CudaBackend;

const ROUNDS: usize = 3000;

#[test]
fn streams_are_destroyed_while_memory_is_freed() {
    let installed = support::Installed::new();
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
            // SAFETY: nobody else has it, and nothing was submitted with it.
            unsafe { of_memory.free(range) }.expect("freed");
        }
        let _ = done.send(());
    });
    // Threads that wait for each other end with the process.
    for _ in 0..2 {
        both.recv_timeout(Duration::from_secs(60)).expect("both threads come to an end");
    }
}
