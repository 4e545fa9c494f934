//! The requests that the other process of the tests serves.

use std::sync::Arc;
use std::time::Duration;

use device_ipc_core::backend::{DeviceIpc, HandleKind, TestKernels};
use device_ipc_core::{
    Access, Descriptor, DevicePtr, DeviceRange, Error, Export, Ipc, Mapping, close_unused,
};
use device_ipc_cuda::{CudaBackend, make_pool_shareable};
use device_ipc_test_process::serve;

const SOON: Duration = Duration::from_secs(30);

/// Serves requests until the end of input.
pub(crate) fn run() {
    let backend = CudaBackend::load().unwrap();
    let ipc = Ipc::with_backend(backend.clone());
    let mut process = Process { ipc, backend, open: Vec::new(), shared: Vec::new() };
    serve(|request, argument| {
        let words: Vec<&str> = [request].into_iter().chain(argument.split_whitespace()).collect();
        process.answer(&words).unwrap_or_else(|error| format!("error: {error}"))
    });
}

struct Process {
    backend: Arc<CudaBackend>,
    ipc: Ipc,
    open: Vec<Mapping>,
    shared: Vec<Export>,
}

impl Process {
    fn answer(&mut self, words: &[&str]) -> Result<String, Box<dyn std::error::Error>> {
        match words {
            ["open", descriptor] => self.open(descriptor, Access::ReadWrite),
            ["open-read-only", descriptor] => self.open(descriptor, Access::ReadOnly),
            ["byte", mapping, offset] => {
                let range = self.slice(mapping, offset, 1)?;
                Ok(self.read(range)?[0].to_string())
            }
            ["bytes-are", mapping, byte] => {
                let range = self.open[mapping.parse::<usize>()?].range();
                let byte: u8 = byte.parse()?;
                Ok(self.read(range)?.iter().all(|one| *one == byte).to_string())
            }
            ["fill", mapping, offset, len, byte] => {
                let range = self.slice(mapping, offset, len.parse()?)?;
                let stream = self.backend.memory().create_stream(range.device)?;
                // SAFETY: the mapping is open; the parent reads it after the answer.
                unsafe { self.backend.memory().fill(range, byte.parse()?, stream.as_borrowed())? };
                self.backend.memory().synchronize(stream.as_borrowed())?;
                Ok("filled".into())
            }
            // A kernel, whose access only the hardware restricts: it may leave the mapping.
            ["add", mapping, offset] => {
                let base = self.open[mapping.parse::<usize>()?].range();
                let ptr = DevicePtr::new(base.ptr.get().wrapping_add_signed(offset.parse()?));
                let stream = self.backend.memory().create_stream(base.device)?;
                let range = DeviceRange::new(base.device, ptr, 4);
                // SAFETY: the parent ensures that the bytes there may be changed, or that this process may fail.
                unsafe { self.backend.add_f32(range, 1.0, stream.as_borrowed())? };
                self.backend.memory().synchronize(stream.as_borrowed())?;
                Ok("added".into())
            }
            ["close", mapping] => {
                let mapping = self.open.remove(mapping.parse()?);
                let range = mapping.range();
                drop(mapping);
                close_unused(SOON)?;
                // The driver no longer knows the address.
                match self.backend.extents_of(range, None) {
                    Err(Error::NotDeviceMemory { .. }) => Ok("closed".into()),
                    other => Ok(format!("still there: {other:?}")),
                }
            }
            ["descriptors"] => Ok(std::fs::read_dir("/proc/self/fd")?.count().to_string()),
            ["allocate-by-cudarc"] => self.allocate_by_cudarc(),
            ["make-pool-shareable"] => {
                make_pool_shareable(0)?;
                Ok("made".into())
            }
            ["share", kind, bytes, byte] => {
                let kind = HandleKind(kind.parse()?);
                let buffer = self.ipc.allocate_for(0, bytes.parse()?, kind)?;
                let stream = self.ipc.create_stream(0)?;
                buffer.view_mut::<u8, _>(&stream)?.fill_bytes(byte.parse()?)?;
                stream.synchronize()?;
                self.shared.push(self.ipc.share(buffer).start().map_err(|error| error.to_string())?);
                Ok(self.shared.last().ok_or("nothing")?.descriptor().to_string())
            }
            _ => Err("an unknown request".into()),
        }
    }

    fn open(&mut self, line: &str, access: Access) -> Result<String, Box<dyn std::error::Error>> {
        let descriptor: Descriptor = line.parse()?;
        let mapping = self.ipc.open(&descriptor).access(access).on_device(0)?;
        self.open.push(mapping);
        Ok(format!("opened {}", self.open.len() - 1))
    }

    fn slice(
        &self,
        mapping: &str,
        offset: &str,
        len: u64,
    ) -> Result<DeviceRange, Box<dyn std::error::Error>> {
        let range = self.open[mapping.parse::<usize>()?].range();
        Ok(range.slice(offset.parse()?, len).ok_or("outside the mapping")?)
    }

    fn read(&self, range: DeviceRange) -> Result<Vec<u8>, Box<dyn std::error::Error>> {
        let stream = self.backend.memory().create_stream(range.device)?;
        let mut bytes = vec![0; range.len as usize];
        // SAFETY: the mapping is open, and the parent has finished with its bytes.
        unsafe { self.backend.memory().read(range, &mut bytes, stream.as_borrowed())? };
        Ok(bytes)
    }

    /// Shares a slice of cudarc. Returns the descriptor, or the error.
    fn allocate_by_cudarc(&mut self) -> Result<String, Box<dyn std::error::Error>> {
        let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
        let slice = stream.clone_htod(&[7u8; 5000])?;
        stream.synchronize()?;
        self.shared.push(self.ipc.share(slice).start().map_err(|error| error.to_string())?);
        Ok(self.shared.last().ok_or("nothing")?.descriptor().to_string())
    }
}
