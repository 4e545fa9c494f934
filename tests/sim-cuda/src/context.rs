//! Contexts: primary ones and others, and each thread's stack of them ("Context Management", "Primary Context
//! Management" and "Peer Context Memory Access" in `cuda.h`).

use std::cell::RefCell;
use std::collections::HashSet;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::ThreadId;

use device_ipc_mock_engine::{EngineError, StreamId};

use crate::entry::driver;
use crate::ffi::Out;
use crate::simulator::{Objects, ResetObject, lock, next_handle, simulator};
use crate::status::{Result, Status, sticky};

/// A context. A primary context that was reset is the same context when it is retained again.
pub(crate) struct Context {
    pub(crate) handle: u64,
    /// Ordinal of the device.
    pub(crate) device: usize,
    primary: bool,
    alive: AtomicBool,
    /// `cuCtxGetId`: a primary context gets a new one each time it is activated.
    id: AtomicU64,
    /// The status that all calls return after work has failed; 0 before.
    failed: AtomicI32,
    flags: AtomicU32,
    /// The thread whose call blocks all other threads' calls on this context until streams are complete.
    holder: Mutex<Option<ThreadId>>,
    released: Condvar,
    /// Other devices whose memory kernels of this context may access.
    pub(crate) peers: Mutex<HashSet<usize>>,
    /// The engine's streams of the legacy default stream and the per-thread default stream.
    pub(crate) defaults: Mutex<[Option<StreamId>; 2]>,
    /// Destroyed streams with unfinished work.
    pub(crate) draining: Mutex<Vec<StreamId>>,
}

fn next_id() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

impl Context {
    fn new(device: usize, primary: bool, flags: u32) -> Arc<Self> {
        Arc::new(Self {
            handle: next_handle(),
            device,
            primary,
            alive: AtomicBool::new(true),
            id: AtomicU64::new(next_id()),
            failed: AtomicI32::new(0),
            flags: AtomicU32::new(flags),
            holder: Mutex::default(),
            released: Condvar::new(),
            peers: Mutex::default(),
            defaults: Mutex::default(),
            draining: Mutex::default(),
        })
    }

    /// Waits while another thread's call blocks the context, and fails if the context has failed or was destroyed.
    pub(crate) fn check_usable(&self) -> Result {
        let own = std::thread::current().id();
        let mut holder = lock(&self.holder);
        while holder.is_some_and(|holder| holder != own) {
            holder = self.released.wait(holder).unwrap_or_else(PoisonError::into_inner);
        }
        drop(holder);
        if !self.alive.load(Ordering::Acquire) {
            return Err(Status::CONTEXT_IS_DESTROYED);
        }
        match self.failed.load(Ordering::Acquire) {
            0 => Ok(()),
            status => Err(Status(status)),
        }
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    /// Marks the context as failed: every later call returns the status of the first failure.
    pub(crate) fn fail(&self, error: &EngineError) {
        let status = sticky(error);
        let _ = self.failed.compare_exchange(0, status.0, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Converts the result of a wait for work. A failure of the work is a failure of the context.
    pub(crate) fn settle<T>(&self, result: std::result::Result<T, EngineError>) -> Result<T> {
        match result {
            Ok(value) => Ok(value),
            Err(error @ (EngineError::NotPermitted { .. } | EngineError::Forked)) => Err(error.into()),
            Err(error) => {
                self.fail(&error);
                Err(Status(self.failed.load(Ordering::Acquire)))
            }
        }
    }

    /// Waits for all work of all streams, and blocks calls of other threads on this context meanwhile, as the
    /// driver does when it unmaps memory.
    pub(crate) fn synchronize_exclusively(&self) -> Result {
        {
            let mut holder = lock(&self.holder);
            while holder.is_some() {
                holder = self.released.wait(holder).unwrap_or_else(PoisonError::into_inner);
            }
            *holder = Some(std::thread::current().id());
        }
        let result = self.synchronize();
        *lock(&self.holder) = None;
        self.released.notify_all();
        result
    }

    /// Waits for all work of all streams.
    pub(crate) fn synchronize(&self) -> Result {
        let simulator = simulator()?;
        let mut streams: Vec<StreamId> = lock(&self.defaults).iter().flatten().copied().collect();
        {
            let objects = simulator.objects();
            let own = objects.streams.values().filter(|stream| stream.context.handle == self.handle);
            streams.extend(own.map(|stream| stream.engine));
        }
        // The streams stay in the list until the wait is complete, because another thread may start to wait.
        let draining = lock(&self.draining).clone();
        let mut result = Ok(());
        for stream in streams.into_iter().chain(draining.iter().copied()) {
            match simulator.machine.synchronize(stream) {
                // Destroyed by another thread.
                Err(EngineError::InvalidStream { .. }) => {}
                waited => result = result.and(self.settle(waited)),
            }
        }
        lock(&self.draining).retain(|stream| !draining.contains(stream));
        for stream in draining {
            // May be removed by another thread already.
            let _ = simulator.machine.destroy_stream(stream);
        }
        result
    }
}

/// The primary context of a device, and its reference count.
pub(crate) struct PrimaryContext {
    device: usize,
    context: Option<Arc<Context>>,
    retained: u32,
    flags: u32,
}

impl PrimaryContext {
    pub(crate) fn new(device: usize) -> Self {
        Self { device, context: None, retained: 0, flags: 0 }
    }
}

thread_local! {
    static STACK: RefCell<Vec<Arc<Context>>> = const { RefCell::new(Vec::new()) };
}

/// Returns the current context of this thread, in any state.
pub(crate) fn current_unchecked() -> Result<Arc<Context>> {
    simulator()?;
    STACK.with_borrow(|stack| stack.last().cloned()).ok_or(Status::INVALID_CONTEXT)
}

/// Returns the current context of this thread.
///
/// # Errors
/// `INVALID_CONTEXT` without one, `CONTEXT_IS_DESTROYED`, and the status of failed work of the context.
pub(crate) fn current() -> Result<Arc<Context>> {
    let context = current_unchecked()?;
    context.check_usable()?;
    Ok(context)
}

/// Returns the ordinal of a `CUdevice`.
pub(crate) fn device(device: c_int) -> Result<usize> {
    let count = simulator()?.devices;
    usize::try_from(device).ok().filter(|ordinal| *ordinal < count).ok_or(Status::INVALID_DEVICE)
}

/// Returns the context of a handle.
pub(crate) fn context(handle: u64) -> Result<Arc<Context>> {
    simulator()?.objects().contexts.get(&handle).cloned().ok_or(Status::INVALID_CONTEXT)
}

/// Releases all objects of a context, and deactivates it.
fn deactivate(context: &Arc<Context>) -> Result {
    let simulator = simulator()?;
    // The objects are released also after a failure of work.
    let _ = context.synchronize();
    context.alive.store(false, Ordering::Release);
    let mut streams: Vec<StreamId> =
        std::mem::take(&mut *lock(&context.defaults)).into_iter().flatten().collect();
    let mut objects = simulator.objects();
    let Objects {
        streams: table, events, modules, functions, memory, pools, directory, reset_objects, ..
    } = &mut *objects;
    table.retain(|handle, stream| {
        let own = stream.context.handle == context.handle;
        if own {
            streams.push(stream.engine);
            reset_objects.insert(*handle, ResetObject::Stream);
        }
        !own
    });
    events.retain(|handle, event| {
        let own = event.context.handle == context.handle;
        if own {
            event.retire(simulator, directory.as_mut());
            reset_objects.insert(*handle, ResetObject::Event);
        }
        !own
    });
    modules.retain(|_, module| module.context != context.handle);
    functions.retain(|_, function| function.module.context != context.handle);
    let remains = memory.remove_all_of(&simulator.machine, context.handle, pools, directory.as_mut());
    drop(objects);
    for one in remains {
        one.give_back(&simulator.machine);
    }
    for stream in streams {
        let _ = simulator.machine.destroy_stream(stream);
    }
    Ok(())
}

fn reset_primary(device: usize) -> Result {
    let simulator = simulator()?;
    let context = simulator.objects().primaries[device].context.clone();
    match context {
        Some(context) if context.is_alive() => deactivate(&context),
        _ => Ok(()),
    }
}

fn create(out: Out<u64>, flags: c_uint, number: c_int) -> Result {
    let device = device(number)?;
    let context = Context::new(device, false, flags);
    out.put(context.handle)?;
    simulator()?.objects().contexts.insert(context.handle, context.clone());
    STACK.with_borrow_mut(|stack| stack.push(context));
    Ok(())
}

driver! {
    /// Retains the primary context, and creates it if necessary.
    fn cuDevicePrimaryCtxRetain(out: Out<u64>, number: c_int) {
        let device = device(number)?;
        let simulator = simulator()?;
        let _changing = lock(&simulator.changing[device]);
        let mut objects = simulator.objects();
        let primary = &mut objects.primaries[device];
        let context = match &primary.context {
            Some(context) => {
                if !context.is_alive() {
                    context.failed.store(0, Ordering::Release);
                    context.id.store(next_id(), Ordering::Release);
                    context.alive.store(true, Ordering::Release);
                }
                context.clone()
            }
            None => primary.context.insert(Context::new(primary.device, true, primary.flags)).clone(),
        };
        out.put(context.handle)?;
        primary.retained += 1;
        objects.contexts.insert(context.handle, context);
        Ok(())
    }

    /// Releases the primary context; the last release frees all its objects.
    fn cuDevicePrimaryCtxRelease_v2(number: c_int) {
        let device = device(number)?;
        let simulator = simulator()?;
        let _changing = lock(&simulator.changing[device]);
        let last = {
            let mut objects = simulator.objects();
            let primary = &mut objects.primaries[device];
            primary.retained = primary.retained.checked_sub(1).ok_or(Status::INVALID_CONTEXT)?;
            primary.retained == 0
        };
        if last { reset_primary(device) } else { Ok(()) }
    }

    /// Frees all objects of the primary context, whatever its reference count.
    fn cuDevicePrimaryCtxReset_v2(number: c_int) {
        let device = device(number)?;
        let _changing = lock(&simulator()?.changing[device]);
        reset_primary(device)
    }

    /// Returns whether the primary context is active, and its flags.
    fn cuDevicePrimaryCtxGetState(number: c_int, flags: Out<c_uint>, active: Out<c_int>) {
        let device = device(number)?;
        let objects = simulator()?.objects();
        let primary = &objects.primaries[device];
        let alive = primary.context.as_ref().is_some_and(|context| context.is_alive());
        flags.put(primary.flags)?;
        active.put(c_int::from(alive))
    }

    /// Sets the flags of the primary context.
    fn cuDevicePrimaryCtxSetFlags_v2(number: c_int, flags: c_uint) {
        let device = device(number)?;
        simulator()?.objects().primaries[device].flags = flags;
        Ok(())
    }

    /// Creates a context and makes it current.
    fn cuCtxCreate_v2(out: Out<u64>, flags: c_uint, number: c_int) {
        create(out, flags, number)
    }

    /// Creates a context and makes it current. The parameters for devices shared with graphics are not supported.
    fn cuCtxCreate_v4(out: Out<u64>, parameters: *const c_void, flags: c_uint, number: c_int) {
        if !parameters.is_null() {
            return Err(Status::NOT_SUPPORTED);
        }
        create(out, flags, number)
    }

    /// Destroys a context that `cuCtxCreate` made.
    fn cuCtxDestroy_v2(handle: u64) {
        let context = context(handle)?;
        if context.primary {
            return Err(Status::INVALID_CONTEXT);
        }
        deactivate(&context)?;
        simulator()?.objects().contexts.remove(&handle);
        // The context is popped from the caller's stack; other threads keep it as a destroyed one.
        STACK.with_borrow_mut(|stack| {
            if stack.last().is_some_and(|top| top.handle == handle) {
                stack.pop();
            }
        });
        Ok(())
    }

    /// Pushes a context on the thread's stack.
    fn cuCtxPushCurrent_v2(handle: u64) {
        let context = context(handle)?;
        STACK.with_borrow_mut(|stack| stack.push(context));
        Ok(())
    }

    /// Pops the current context from the thread's stack.
    fn cuCtxPopCurrent_v2(out: Out<u64>) {
        simulator()?;
        let popped = STACK.with_borrow_mut(Vec::pop).ok_or(Status::INVALID_CONTEXT)?;
        out.put_if_not_null(popped.handle);
        Ok(())
    }

    /// Replaces the current context; null removes it.
    fn cuCtxSetCurrent(handle: u64) {
        simulator()?;
        let context = if handle == 0 { None } else { Some(context(handle)?) };
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            stack.extend(context);
        });
        Ok(())
    }

    /// Returns the current context, or null.
    fn cuCtxGetCurrent(out: Out<u64>) {
        simulator()?;
        out.put(STACK.with_borrow(|stack| stack.last().map_or(0, |context| context.handle)))
    }

    /// Returns the device of the current context.
    fn cuCtxGetDevice(out: Out<c_int>) {
        out.put(current_unchecked()?.device as c_int)
    }

    /// Returns the unique id of a context. A primary context gets a new one after a reset.
    fn cuCtxGetId(handle: u64, out: Out<u64>) {
        let context = match handle {
            0 => current_unchecked()?,
            handle => context(handle).map_err(|_| Status::CONTEXT_IS_DESTROYED)?,
        };
        if !context.is_alive() {
            return Err(Status::CONTEXT_IS_DESTROYED);
        }
        out.put(context.id.load(Ordering::Acquire))
    }

    /// Returns the flags of the current context.
    fn cuCtxGetFlags(out: Out<c_uint>) {
        out.put(current_unchecked()?.flags.load(Ordering::Relaxed))
    }

    /// Waits for all work of the current context.
    fn cuCtxSynchronize() {
        let context = current()?;
        crate::capture::refuse_in(&context)?;
        context.synchronize()
    }

    /// Gives kernels of the current context access to the memory of another context's device.
    fn cuCtxEnablePeerAccess(handle: u64, flags: c_uint) {
        let own = current()?;
        let peer = context(handle)?;
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        // A device is not its own peer.
        if peer.device == own.device || !simulator()?.machine.peer_access(own.device, peer.device)? {
            return Err(Status::PEER_ACCESS_UNSUPPORTED);
        }
        if lock(&own.peers).insert(peer.device) { Ok(()) } else { Err(Status::PEER_ACCESS_ALREADY_ENABLED) }
    }

    /// Revokes the access of `cuCtxEnablePeerAccess`.
    fn cuCtxDisablePeerAccess(handle: u64) {
        let own = current()?;
        let peer = context(handle)?;
        if lock(&own.peers).remove(&peer.device) { Ok(()) } else { Err(Status::PEER_ACCESS_NOT_ENABLED) }
    }
}
