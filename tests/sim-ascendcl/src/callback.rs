//! Host functions that streams call, on threads that the program provides.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::abi::{ExceptionInfo, Handle, Pointer};
use crate::call::calls;
use crate::simulator::{Simulator, lock};
use crate::status::{Outcome, Status, refuse};

/// `aclrtCallback` and `aclrtHostFunc`.
type Function = unsafe extern "C" fn(*mut c_void);

/// `aclrtExceptionInfoCallback`.
type ExceptionFunction = unsafe extern "C" fn(*mut ExceptionInfo);

/// A host function and its argument, for a thread.
struct Job {
    function: Function,
    argument: u64,
    done: Arc<Completion>,
}

impl Job {
    fn run(self) {
        // SAFETY: the caller of the launching call guarantees that the function accepts this argument on any
        // thread.
        unsafe { (self.function)(self.argument as *mut c_void) };
        self.done.set();
    }
}

/// A flag that is set when a job has run.
#[derive(Default)]
struct Completion {
    set: Mutex<bool>,
    condition: Condvar,
}

impl Completion {
    fn set(&self) {
        *lock(&self.set) = true;
        self.condition.notify_all();
    }

    fn wait(&self) {
        let mut set = lock(&self.set);
        while !*set {
            set = self.condition.wait(set).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }
}

/// The jobs of one thread.
#[derive(Default)]
struct Queue {
    jobs: Mutex<VecDeque<Job>>,
    condition: Condvar,
}

impl Queue {
    fn push(&self, job: Job) {
        lock(&self.jobs).push_back(job);
        self.condition.notify_all();
    }

    /// Waits for the next job; `None` after `limit`.
    fn next(&self, limit: Option<Duration>) -> Option<Job> {
        let end = limit.map(|limit| Instant::now() + limit);
        let mut jobs = lock(&self.jobs);
        loop {
            if let Some(job) = jobs.pop_front() {
                return Some(job);
            }
            let left =
                end.map_or(Duration::from_secs(1), |end| end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return None;
            }
            jobs =
                self.condition.wait_timeout(jobs, left).unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }
}

/// The threads that serve streams, for one of the two mechanisms.
#[derive(Default)]
struct Subscriptions {
    /// Jobs by thread.
    queues: HashMap<u64, Arc<Queue>>,
    /// Threads by stream.
    streams: HashMap<u64, u64>,
}

static REPORTS: Mutex<Option<Subscriptions>> = Mutex::new(None);
static HOST_FUNCTIONS: Mutex<Option<Subscriptions>> = Mutex::new(None);
static EXCEPTIONS: Mutex<Option<ExceptionFunction>> = Mutex::new(None);

/// Returns the calling thread's `pthread_self`.
fn this_thread() -> u64 {
    unsafe extern "C" {
        fn pthread_self() -> usize;
    }
    // SAFETY: the function has no arguments and cannot fail.
    unsafe { pthread_self() as u64 }
}

fn with<T>(subscriptions: &Mutex<Option<Subscriptions>>, look: impl FnOnce(&mut Subscriptions) -> T) -> T {
    look(lock(subscriptions).get_or_insert_default())
}

fn subscribe(subscriptions: &Mutex<Option<Subscriptions>>, thread: u64, stream: u64) -> Outcome {
    with(subscriptions, |subscriptions| {
        if subscriptions.streams.contains_key(&stream) {
            return refuse(Status::RT_STREAM_SUBSCRIBE, "a thread is subscribed to the stream already");
        }
        subscriptions.queues.entry(thread).or_default();
        subscriptions.streams.insert(stream, thread);
        Ok(())
    })
}

fn unsubscribe(subscriptions: &Mutex<Option<Subscriptions>>, thread: u64, stream: u64) -> Outcome {
    with(subscriptions, |subscriptions| {
        if subscriptions.streams.get(&stream) != Some(&thread) {
            return refuse(Status::RT_THREAD_SUBSCRIBE, "the thread is not subscribed to the stream");
        }
        subscriptions.streams.remove(&stream);
        if !subscriptions.streams.values().any(|&other| other == thread) {
            subscriptions.queues.remove(&thread);
        }
        Ok(())
    })
}

fn queue_of(subscriptions: &Mutex<Option<Subscriptions>>, stream: u64) -> Option<Arc<Queue>> {
    with(subscriptions, |subscriptions| {
        subscriptions.streams.get(&stream).and_then(|thread| subscriptions.queues.get(thread)).cloned()
    })
}

/// Runs the jobs of the calling thread.
fn process(subscriptions: &Mutex<Option<Subscriptions>>, milliseconds: i32) -> Outcome {
    let limit = crate::stream::limit_of(milliseconds)?;
    let queue = with(subscriptions, |subscriptions| subscriptions.queues.get(&this_thread()).cloned());
    let Some(queue) = queue else {
        return refuse(Status::RT_THREAD_SUBSCRIBE, "this thread is not subscribed to any stream");
    };
    match queue.next(limit) {
        Some(job) => job.run(),
        None => return refuse(Status::RT_REPORT_TIMEOUT, "no callback arrived in time"),
    }
    while let Some(job) = queue.next(Some(Duration::ZERO)) {
        job.run();
    }
    Ok(())
}

impl Simulator {
    fn launch(&self, function: Option<Function>, argument: Handle, block: bool, stream: Handle) -> Outcome {
        let Some(function) = function else { return refuse(Status::INVALID_PARAM, "fn is a null pointer") };
        let target = self.target(stream)?;
        let Some(queue) = queue_of(&REPORTS, target.stream.get()) else {
            return refuse(
                Status::RT_STREAM_NO_CB_REG,
                "no thread is subscribed to the stream: call aclrtSubscribeReport",
            );
        };
        let argument = argument.value();
        let work = move || {
            let done = Arc::new(Completion::default());
            queue.push(Job { function, argument, done: done.clone() });
            if block {
                done.wait();
            }
        };
        Ok(self.machine.host_fn(Box::new(work), target.stream)?)
    }

    fn launch_host_function(&self, function: Option<Function>, argument: Handle, stream: Handle) -> Outcome {
        let Some(function) = function else { return refuse(Status::INVALID_PARAM, "fn is a null pointer") };
        let target = self.target(stream)?;
        let queue = queue_of(&HOST_FUNCTIONS, target.stream.get());
        let argument = argument.value();
        let work = move || {
            let done = Arc::new(Completion::default());
            let job = Job { function, argument, done: done.clone() };
            match queue {
                Some(queue) => {
                    queue.push(job);
                    done.wait();
                }
                None => job.run(),
            }
        };
        Ok(self.machine.host_fn(Box::new(work), target.stream)?)
    }
}

calls! {
    /// Subscribes a thread (`pthread_self`) to the callbacks of a stream.
    run fn aclrtSubscribeReport(sim, thread: u64, stream: Handle) {
        let stream = sim.any_stream(stream)?;
        subscribe(&REPORTS, thread, stream.get())
    }

    /// Unsubscribes a thread from the callbacks of a stream.
    run fn aclrtUnSubscribeReport(sim, thread: u64, stream: Handle) {
        let stream = sim.any_stream(stream)?;
        unsubscribe(&REPORTS, thread, stream.get())
    }

    /// Waits for callbacks with a time limit, and runs them.
    run fn aclrtProcessReport(_sim, milliseconds: i32) {
        process(&REPORTS, milliseconds)
    }

    /// Submits a callback; with `block` 1 the stream waits for it.
    run fn aclrtLaunchCallback(sim, function: Option<Function>, argument: Handle, block: i32, stream: Handle) {
        if !matches!(block, 0 | 1) {
            return refuse(Status::INVALID_PARAM, "blockType is 0 or 1");
        }
        sim.launch(function, argument, block == 1, stream)
    }

    /// Subscribes a thread (`pthread_self`) to the host functions of a stream.
    run fn aclrtSubscribeHostFunc(sim, thread: u64, stream: Handle) {
        let stream = sim.any_stream(stream)?;
        subscribe(&HOST_FUNCTIONS, thread, stream.get())
    }

    /// Unsubscribes a thread from the host functions of a stream.
    run fn aclrtUnSubscribeHostFunc(sim, thread: u64, stream: Handle) {
        let stream = sim.any_stream(stream)?;
        unsubscribe(&HOST_FUNCTIONS, thread, stream.get())
    }

    /// Waits for host functions with a time limit, and runs them.
    run fn aclrtProcessHostFunc(_sim, milliseconds: i32) {
        process(&HOST_FUNCTIONS, milliseconds)
    }

    /// Submits a host function; the stream waits for it.
    run fn aclrtLaunchHostFunc(sim, stream: Handle, function: Option<Function>, argument: Handle) {
        sim.launch_host_function(function, argument, stream)
    }

    /// Sets the callback for failed kernels; null removes it.
    run fn aclrtSetExceptionInfoCallback(_sim, function: Option<ExceptionFunction>) {
        *lock(&EXCEPTIONS) = function;
        Ok(())
    }

    /// Returns the number of the work that this thread submitted last. Always 0.
    run fn aclrtGetThreadLastTaskId(sim, task: Pointer<u32>) {
        sim.current()?;
        task.put(0, "taskId")
    }

    /// Returns the arguments of a failed kernel. Not supported.
    run fn aclrtGetArgsFromExceptionInfo(
        _sim,
        info: Pointer<ExceptionInfo>,
        _arguments: Pointer<Handle>,
        _len: Pointer<u32>,
    ) {
        info.check("info")?;
        refuse(Status::RT_PARAM_INVALID, "the arguments are not supported")
    }

    /// Returns the failed kernel. Not supported.
    run fn aclrtGetFuncHandleFromExceptionInfo(_sim, info: Pointer<ExceptionInfo>, _function: Pointer<Handle>) {
        info.check("info")?;
        refuse(Status::RT_PARAM_INVALID, "the kernel is not supported")
    }
}

/// Calls the callback for failed kernels.
pub(crate) fn report_exception(mut info: ExceptionInfo) {
    let function = *lock(&EXCEPTIONS);
    if let Some(function) = function {
        // SAFETY: set as a function of this type; the value lives until it returns.
        unsafe { function(&raw mut info) };
    }
}

/// Returns a field of the description of a failure; the maximum for a null pointer.
fn field(info: Pointer<ExceptionInfo>, take: impl FnOnce(ExceptionInfo) -> u32) -> u32 {
    info.get("info").map_or(u32::MAX, take)
}

/// Returns the number of the failed work.
///
/// # Safety
///
/// The pointer is null, or the argument of the callback.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtGetTaskIdFromExceptionInfo(info: Pointer<ExceptionInfo>) -> u32 {
    field(info, |info| info.task)
}

/// Returns the number of the stream of failed work.
///
/// # Safety
///
/// The pointer is null, or the argument of the callback.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtGetStreamIdFromExceptionInfo(info: Pointer<ExceptionInfo>) -> u32 {
    field(info, |info| info.stream)
}

/// Returns the number of the thread that submitted failed work.
///
/// # Safety
///
/// The pointer is null, or the argument of the callback.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtGetThreadIdFromExceptionInfo(info: Pointer<ExceptionInfo>) -> u32 {
    field(info, |info| info.thread)
}

/// Returns the device of failed work.
///
/// # Safety
///
/// The pointer is null, or the argument of the callback.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtGetDeviceIdFromExceptionInfo(info: Pointer<ExceptionInfo>) -> u32 {
    field(info, |info| info.device)
}

/// Returns the status of failed work.
///
/// # Safety
///
/// The pointer is null, or the argument of the callback.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtGetErrorCodeFromExceptionInfo(info: Pointer<ExceptionInfo>) -> u32 {
    field(info, |info| info.status)
}
