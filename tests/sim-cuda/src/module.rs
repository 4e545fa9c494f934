//! Kernels ("Module Management" and "Execution Control" in `cuda.h`): interpreted PTX.

use std::ffi::{c_uint, c_void};
use std::sync::Arc;

use device_ipc_mock_engine::{Address, EngineError, KernelMemory};

use crate::context::{Context, current};
use crate::entry::driver;
use crate::ffi::{In, Out, Text};
use crate::ptx::{Grid, Memory, Parameter, Program};
use crate::simulator::{next_handle, simulator};
use crate::status::Status;
use crate::stream::target;

/// A module that was loaded into a context.
pub(crate) struct Module {
    pub(crate) context: u64,
    program: Arc<Program>,
}

/// A kernel of a module.
#[derive(Clone)]
pub(crate) struct Function {
    pub(crate) module: Arc<Module>,
    handle: u64,
    entry: usize,
}

/// `CU_LAUNCH_PARAM_*` is not supported: parameters are passed separately.
const THREADS_PER_BLOCK: u64 = 1024;

/// The engine's memory, with the context's access to the memory of peers.
struct ContextMemory<'a> {
    memory: &'a mut KernelMemory,
    context: &'a Context,
    /// The range for which the access was checked last.
    asked: Option<(u64, u64)>,
}

impl ContextMemory<'_> {
    fn check(&mut self, address: u64) -> std::result::Result<Address, EngineError> {
        let at = Address::new(address);
        if self.asked.is_some_and(|(first, end)| (first..end).contains(&address)) {
            return Ok(at);
        }
        let illegal = EngineError::IllegalAddress { address: at, device: self.context.device };
        let simulator = simulator().map_err(|_| EngineError::Cancelled)?;
        match simulator.objects().memory.kernel_access(self.context, address) {
            Some((_, _, false)) => return Err(illegal),
            Some((first, end, true)) => self.asked = Some((first, end)),
            None => {}
        }
        Ok(at)
    }
}

impl Memory for ContextMemory<'_> {
    type Error = EngineError;

    fn load(&mut self, address: u64, len: u64) -> std::result::Result<u64, EngineError> {
        let at = self.check(address)?;
        self.memory.load(at, len)
    }

    fn store(&mut self, address: u64, len: u64, value: u64) -> std::result::Result<(), EngineError> {
        let at = self.check(address)?;
        self.memory.store(at, len, value)
    }
}

driver! {
    /// Loads PTX.
    fn cuModuleLoadData(out: Out<u64>, image: Text) {
        let context = current()?;
        // An image that is not text is for a real device, or invalid.
        let text = image.get().map_err(|_| Status::INVALID_IMAGE)?;
        if !text.lines().any(|line| line.trim_start().starts_with(".version")) {
            return Err(Status::INVALID_IMAGE);
        }
        let program = Program::parse(text).map_err(|why| {
            eprintln!("device-ipc-sim-cuda: PTX {why}");
            Status::INVALID_PTX
        })?;
        if !program.is_known_to(simulator()?.config.version) {
            return Err(Status::UNSUPPORTED_PTX_VERSION);
        }
        let handle = next_handle();
        let module = Arc::new(Module { context: context.handle, program: Arc::new(program) });
        simulator()?.objects().modules.insert(handle, module);
        out.put(handle)
    }

    /// Unloads a module.
    fn cuModuleUnload(handle: u64) {
        let mut objects = simulator()?.objects();
        let module = objects.modules.remove(&handle).ok_or(Status::INVALID_HANDLE)?;
        objects.functions.retain(|_, function| !Arc::ptr_eq(&function.module, &module));
        Ok(())
    }

    /// Returns a kernel of a module by its name.
    fn cuModuleGetFunction(out: Out<u64>, module: u64, name: Text) {
        let mut objects = simulator()?.objects();
        let module = objects.modules.get(&module).cloned().ok_or(Status::INVALID_HANDLE)?;
        let entry = module.program.entry(name.get()?).ok_or(Status::NOT_FOUND)?;
        let known = objects
            .functions
            .values()
            .find(|function| Arc::ptr_eq(&function.module, &module) && function.entry == entry);
        if let Some(known) = known {
            return out.put(known.handle);
        }
        let handle = next_handle();
        objects.functions.insert(handle, Function { module, handle, entry });
        out.put(handle)
    }

    /// Launches a kernel. The parameters are copied during the call.
    fn cuLaunchKernel(
        function: u64,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        _shared_bytes: c_uint,
        stream: u64,
        parameters: In<*const c_void>,
        extra: *const c_void,
    ) {
        let target = target(stream)?;
        let known = simulator()?.objects().functions.get(&function).cloned();
        let Function { module, entry, .. } = known.ok_or(Status::INVALID_HANDLE)?;
        let grid = Grid { blocks: [grid_x, grid_y, grid_z], threads: [block_x, block_y, block_z] };
        let product = |sizes: [u32; 3]| sizes.into_iter().map(u64::from).product::<u64>();
        let threads = product(grid.threads);
        if product(grid.blocks) == 0 || !(1..=THREADS_PER_BLOCK).contains(&threads) || !extra.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        if module.context != target.context.handle {
            return Err(Status::INVALID_HANDLE);
        }
        let mut values = Vec::new();
        for (index, Parameter { offset, len }) in module.program.parameters(entry).enumerate() {
            let first = parameters.at(index)? as usize;
            values.resize(offset, 0);
            for at in first..first + len {
                values.push(Out::<u8>::from_address(at).get()?);
            }
        }
        let context = target.context.clone();
        let kernel = move |memory: &mut KernelMemory| {
            let mut seen = ContextMemory { memory, context: &context, asked: None };
            let ran = module.program.run(entry, &values, grid, &mut seen);
            // Set before the stream drops later work, so that this failure is the first one.
            ran.inspect_err(|error| context.fail(error))
        };
        target.submit(|machine| machine.run_kernel(kernel, target.engine))
    }
}
