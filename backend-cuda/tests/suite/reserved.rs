//! Versions of memory that replace each other at one address, under a captured graph, while their exporters are killed. Without a
//! GPU, each test reports it and passes. The simulator has no graphs: there the bytes are read.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaGraph, CudaStream, result, sys};
use device_ipc_core::backend::DeviceMemory;
use device_ipc_core::{AsStream, Descriptor, DeviceOrdinal, DeviceRange, Export, Ipc};
use device_ipc_cuda::{CudaBackend, VIRTUAL_MEMORY};
use device_ipc_test_process::{Process, serve};

use crate::gpu::backend;

const ZERO: DeviceOrdinal = DeviceOrdinal::new(0);
const SOON: Duration = Duration::from_secs(30);
const GIB: u64 = 1 << 30;
/// The exporter is killed after this number of replacements.
const KILLED_AFTER: u32 = 97;

const PTX: &str = concat!(include_str!("sum_u32.ptx"), "\0");

fn is_simulated() -> bool {
    std::env::var_os("DEVICE_IPC_SIM_CUDA").is_some()
}

fn swaps() -> u32 {
    if is_simulated() { 200 } else { 1000 }
}

/// Returns at most `most` bytes, of which the free memory holds several.
fn fitting(backend: &CudaBackend, most: u64) -> u64 {
    let most = if is_simulated() { 2 << 20 } else { most };
    let free = backend.memory_info(ZERO).unwrap().free_bytes;
    most.min(free / 4) / (2 << 20) * (2 << 20)
}

fn exporter() -> Process {
    Process::of_test(concat!(module_path!(), "::the_exporter"), &[])
}

fn share(exporter: &mut Process, bytes: u64, byte: u8) -> Descriptor {
    exporter.ask(&format!("share {bytes} {byte}")).parse().unwrap()
}

/// Exports versions, each in a new block of virtual memory.
#[test]
#[ignore = "the child of the other tests"]
fn the_exporter() {
    let backend = CudaBackend::load().unwrap();
    let ipc = Ipc::with_backend(backend.clone());
    let stream = ipc.create_stream(ZERO).unwrap();
    let mut exports: Vec<Export> = Vec::new();
    serve(|request, argument| match request {
        "share" => {
            let (bytes, byte) = argument.split_once(' ').unwrap();
            let block = ipc.allocate_for(ZERO, bytes.parse().unwrap(), VIRTUAL_MEMORY).unwrap();
            block.view_mut::<u8, _>(&stream).unwrap().fill_bytes(byte.parse().unwrap()).unwrap();
            stream.synchronize().unwrap();
            let export = ipc.share(block).start().unwrap();
            let text = export.descriptor().to_string();
            exports.push(export);
            text
        }
        // All but the newest.
        "free-old" => {
            let newest = exports.pop();
            for export in exports.drain(..) {
                export.close(SOON).unwrap();
            }
            exports.extend(newest);
            "freed".into()
        }
        "free-all" => {
            for export in exports.drain(..) {
                export.close(SOON).unwrap();
            }
            "freed".into()
        }
        other => panic!("no request: {other}"),
    });
}

/// Adds up the words of one address range, by a graph that is captured once.
struct Sum {
    backend: Arc<CudaBackend>,
    range: DeviceRange,
    stream: Arc<CudaStream>,
    result: DeviceRange,
    graph: Option<CudaGraph>,
}

impl Sum {
    fn of(backend: &Arc<CudaBackend>, range: DeviceRange, stream: &Arc<CudaStream>) -> Self {
        let (backend, stream) = (Arc::clone(backend), Arc::clone(stream));
        let result = backend.allocate(ZERO, 8).unwrap();
        let mut sum = Self { backend, range, stream, result, graph: None };
        if !is_simulated() {
            sum.graph = Some(sum.capture());
        }
        sum
    }

    fn capture(&self) -> CudaGraph {
        self.stream.context().bind_to_thread().unwrap();
        // SAFETY: the text ends with a NUL, and the module is never unloaded.
        let kernel = unsafe {
            let module = result::module::load_data(PTX.as_ptr().cast()).unwrap();
            result::module::get_function(module, c"sum_u32".into()).unwrap()
        };
        let (mut data, mut count, mut out) =
            (self.range.ptr.get(), self.range.len / 4, self.result.ptr.get());
        let mut arguments: [*mut c_void; 3] =
            [(&raw mut data).cast(), (&raw mut count).cast(), (&raw mut out).cast()];
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream.begin_capture(mode).unwrap();
        // SAFETY: the arguments have the types of the kernel's parameters and are copied. The addresses hold memory at each
        // launch.
        unsafe {
            result::memset_d8_async(out, 0, 8, self.stream.cu_stream()).unwrap();
            let (grid, block) = ((1024, 1, 1), (256, 1, 1));
            result::launch_kernel(kernel, grid, block, 0, self.stream.cu_stream(), &mut arguments).unwrap();
        }
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        self.stream.end_capture(flags).unwrap().expect("the graph has two nodes")
    }

    /// Asserts that every byte has this value.
    #[track_caller]
    fn is_of(&self, byte: u8, when: &str) {
        let Some(graph) = &self.graph else {
            let mut bytes = vec![0; self.range.len as usize];
            // SAFETY: the caller holds the mapping.
            unsafe { self.backend.read(self.range, &mut bytes, self.stream.as_stream()) }.unwrap();
            assert!(bytes == vec![byte; bytes.len()], "{when}: the bytes are not all {byte}");
            return;
        };
        graph.launch().unwrap();
        let mut sum = [0; 8];
        // SAFETY: memory of this test.
        unsafe { self.backend.read(self.result, &mut sum, self.stream.as_stream()) }.unwrap();
        let words = self.range.len / 4;
        let expected = words * u64::from(u32::from_ne_bytes([byte; 4]));
        assert_eq!(u64::from_ne_bytes(sum), expected, "{when}: the sum of {words} words");
    }
}

impl Drop for Sum {
    fn drop(&mut self) {
        // SAFETY: freed once, after the launches, which `is_of` has waited for.
        unsafe { self.backend.free(self.result) }.unwrap();
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Waits until at least this many bytes are free: the driver removes the contexts of killed processes later.
#[track_caller]
fn is_free(backend: &CudaBackend, bytes: u64, when: &str) {
    let begin = Instant::now();
    let free = || backend.memory_info(ZERO).unwrap().free_bytes;
    while free() < bytes {
        assert!(begin.elapsed() < SOON, "{when}: {} bytes are free, expected at least {bytes}", free());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn versions_replace_each_other_under_a_captured_graph() {
    let Some((backend, _alone)) = backend() else { return };
    let bytes = fitting(&backend, 16 * GIB);
    let ipc = Ipc::with_backend(backend.clone());
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let mut exporter = exporter();
    let first = share(&mut exporter, bytes, 0xff);
    let mut mapping = ipc.open(&first).reserved().on(&stream).unwrap();
    let range = mapping.range();
    let sum = Sum::of(&backend, range, &stream);
    sum.is_of(0xff, "the first version");
    let (mut free, mut times) = (None, Vec::new());
    for swap in 1..=swaps() {
        let (byte, when) = ((swap % 251) as u8, format!("replacement {swap} of {bytes} bytes"));
        if swap % KILLED_AFTER == 0 {
            // The version that is mapped stays.
            exporter.kill();
            sum.is_of(((swap - 1) % 251) as u8, &when);
            exporter = self::exporter();
        }
        let next = share(&mut exporter, bytes, byte);
        let begin = Instant::now();
        mapping.replace_on(&next, &stream).unwrap();
        times.push(begin.elapsed());
        assert_eq!(mapping.range(), range, "{when}");
        exporter.ask("free-old");
        sum.is_of(byte, &when);
        if swap % KILLED_AFTER == 50 {
            // A sleeping importer: its exporter frees everything.
            mapping.suspend().unwrap();
            exporter.ask("free-all");
            let again = share(&mut exporter, bytes, byte);
            mapping.resume(&again).unwrap();
            assert_eq!(mapping.range(), range, "{when}");
            sum.is_of(byte, &when);
        }
        if swap == 10 {
            free = Some(backend.memory_info(ZERO).unwrap().free_bytes);
        }
    }
    // One version and one exporter, as after the tenth; less than one version may be missing.
    is_free(&backend, free.unwrap().saturating_sub(bytes.min(64 << 20) / 2), "after all replacements");
    eprintln!("replace of {} MiB, median of {}: {:?}", bytes >> 20, times.len(), median(times));
}
