//! Functions of the host that streams call, on threads that the program lends for it.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::abi::{ExceptionInfo, Handle, Place};
use crate::call::calls;
use crate::simulator::{Simulator, lock};
use crate::status::{Outcome, Status, refuse};

/// `aclrtCallback` and `aclrtHostFunc`.
type Function = unsafe extern "C" fn(*mut c_void);

/// `aclrtExceptionInfoCallback`.
type ExceptionFunction = unsafe extern "C" fn(*mut ExceptionInfo);

/// A function and its argument, on the way to a thread.
struct Job {
    function: Function,
    argument: u64,
    done: Arc<Done>,
}

impl Job {
    fn run(self) {
        // SAFETY: the caller of the launching call vouches that the function takes this argument on any thread.
        unsafe { (self.function)(self.argument as *mut c_void) };
        self.done.set();
    }
}

/// Set once a job has run.
#[derive(Default)]
struct Done {
    set: Mutex<bool>,
    bell: Condvar,
}

impl Done {
    fn set(&self) {
        *lock(&self.set) = true;
        self.bell.notify_all();
    }

    fn wait(&self) {
        let mut set = lock(&self.set);
        while !*set {
            set = self.bell.wait(set).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }
}

/// Jobs for one thread.
#[derive(Default)]
struct Queue {
    jobs: Mutex<VecDeque<Job>>,
    bell: Condvar,
}

impl Queue {
    fn push(&self, job: Job) {
        lock(&self.jobs).push_back(job);
        self.bell.notify_all();
    }

    /// The next job; `None` if none comes in time.
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
            jobs = self.bell.wait_timeout(jobs, left).unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }
}

/// Threads that serve streams, for one of the two ways.
#[derive(Default)]
struct Served {
    /// Jobs by thread.
    queues: HashMap<u64, Arc<Queue>>,
    /// Thread by stream.
    streams: HashMap<u64, u64>,
}

static REPORTS: Mutex<Option<Served>> = Mutex::new(None);
static HOST_FUNCTIONS: Mutex<Option<Served>> = Mutex::new(None);
static EXCEPTIONS: Mutex<Option<ExceptionFunction>> = Mutex::new(None);

/// The calling thread, as `pthread_self` names it.
fn this_thread() -> u64 {
    unsafe extern "C" {
        fn pthread_self() -> usize;
    }
    // SAFETY: takes nothing and cannot fail.
    unsafe { pthread_self() as u64 }
}

fn with<T>(served: &Mutex<Option<Served>>, look: impl FnOnce(&mut Served) -> T) -> T {
    look(lock(served).get_or_insert_default())
}

fn subscribe(served: &Mutex<Option<Served>>, thread: u64, stream: u64) -> Outcome {
    with(served, |served| {
        if served.streams.contains_key(&stream) {
            return refuse(Status::RT_STREAM_SUBSCRIBE, "the stream is served by a thread already");
        }
        served.queues.entry(thread).or_default();
        served.streams.insert(stream, thread);
        Ok(())
    })
}

fn unsubscribe(served: &Mutex<Option<Served>>, thread: u64, stream: u64) -> Outcome {
    with(served, |served| {
        if served.streams.get(&stream) != Some(&thread) {
            return refuse(Status::RT_THREAD_SUBSCRIBE, "the thread does not serve this stream");
        }
        served.streams.remove(&stream);
        if !served.streams.values().any(|&other| other == thread) {
            served.queues.remove(&thread);
        }
        Ok(())
    })
}

fn queue_of(served: &Mutex<Option<Served>>, stream: u64) -> Option<Arc<Queue>> {
    with(served, |served| served.streams.get(&stream).and_then(|thread| served.queues.get(thread)).cloned())
}

/// Runs what has come for the calling thread.
fn process(served: &Mutex<Option<Served>>, milliseconds: i32) -> Outcome {
    let limit = crate::stream::limit_of(milliseconds)?;
    let queue = with(served, |served| served.queues.get(&this_thread()).cloned());
    let Some(queue) = queue else {
        return refuse(Status::RT_THREAD_SUBSCRIBE, "this thread serves no stream");
    };
    match queue.next(limit) {
        Some(job) => job.run(),
        None => return refuse(Status::RT_REPORT_TIMEOUT, "nothing was to be done"),
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
            return refuse(Status::RT_STREAM_NO_CB_REG, "no thread serves this stream; aclrtSubscribeReport");
        };
        let argument = argument.value();
        let work = move || {
            let done = Arc::new(Done::default());
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
            let done = Arc::new(Done::default());
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
    /// Has a thread, by `pthread_self`, serve the callbacks of a stream.
    run fn aclrtSubscribeReport(sim, thread: u64, stream: Handle) {
        let stream = sim.any_stream(stream)?;
        subscribe(&REPORTS, thread, stream.get())
    }

    /// Ends that.
    run fn aclrtUnSubscribeReport(sim, thread: u64, stream: Handle) {
        let stream = sim.any_stream(stream)?;
        unsubscribe(&REPORTS, thread, stream.get())
    }

    /// Serves: waits for callbacks, for a time, and runs them.
    run fn aclrtProcessReport(_sim, milliseconds: i32) {
        process(&REPORTS, milliseconds)
    }

    /// Has a callback run when a stream gets there; with 1 the stream waits for it.
    run fn aclrtLaunchCallback(sim, function: Option<Function>, argument: Handle, block: i32, stream: Handle) {
        if !matches!(block, 0 | 1) {
            return refuse(Status::INVALID_PARAM, "blockType is 0 or 1");
        }
        sim.launch(function, argument, block == 1, stream)
    }

    /// Has a thread, by `pthread_self`, run the host functions of a stream.
    run fn aclrtSubscribeHostFunc(sim, thread: u64, stream: Handle) {
        let stream = sim.any_stream(stream)?;
        subscribe(&HOST_FUNCTIONS, thread, stream.get())
    }

    /// Ends that.
    run fn aclrtUnSubscribeHostFunc(sim, thread: u64, stream: Handle) {
        let stream = sim.any_stream(stream)?;
        unsubscribe(&HOST_FUNCTIONS, thread, stream.get())
    }

    /// Serves: waits for host functions, for a time, and runs them.
    run fn aclrtProcessHostFunc(_sim, milliseconds: i32) {
        process(&HOST_FUNCTIONS, milliseconds)
    }

    /// Runs a function of the host when a stream gets there; the stream waits for it.
    run fn aclrtLaunchHostFunc(sim, stream: Handle, function: Option<Function>, argument: Handle) {
        sim.launch_host_function(function, argument, stream)
    }

    /// Sets a function that is told of kernels that fail, or takes it back with a null one.
    run fn aclrtSetExceptionInfoCallback(_sim, function: Option<ExceptionFunction>) {
        *lock(&EXCEPTIONS) = function;
        Ok(())
    }

    /// A number for the work that this thread queued last: none is kept.
    run fn aclrtGetThreadLastTaskId(sim, task: Place<u32>) {
        sim.current()?;
        task.put(0, "taskId")
    }

    /// The arguments of a kernel that failed: none are known.
    run fn aclrtGetArgsFromExceptionInfo(
        _sim,
        info: Place<ExceptionInfo>,
        _arguments: Place<Handle>,
        _len: Place<u32>,
    ) {
        info.check("info")?;
        refuse(Status::RT_PARAM_INVALID, "the arguments are not known")
    }

    /// The kernel that failed: it is not known.
    run fn aclrtGetFuncHandleFromExceptionInfo(_sim, info: Place<ExceptionInfo>, _function: Place<Handle>) {
        info.check("info")?;
        refuse(Status::RT_PARAM_INVALID, "the kernel is not known")
    }
}

/// Tells the program of a kernel that failed.
pub(crate) fn tell_exception(mut info: ExceptionInfo) {
    let function = *lock(&EXCEPTIONS);
    if let Some(function) = function {
        // SAFETY: set as a function of this type; the value lives until it returns.
        unsafe { function(&raw mut info) };
    }
}

/// A field of what is known of a failure; the largest number for a null pointer.
fn field(info: Place<ExceptionInfo>, take: impl FnOnce(ExceptionInfo) -> u32) -> u32 {
    info.get("info").map_or(u32::MAX, take)
}

/// Number of the work that failed.
///
/// # Safety
///
/// The pointer is null, or what the callback was given.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtGetTaskIdFromExceptionInfo(info: Place<ExceptionInfo>) -> u32 {
    field(info, |info| info.task)
}

/// Number of its stream.
///
/// # Safety
///
/// The pointer is null, or what the callback was given.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtGetStreamIdFromExceptionInfo(info: Place<ExceptionInfo>) -> u32 {
    field(info, |info| info.stream)
}

/// Number of the thread that queued it.
///
/// # Safety
///
/// The pointer is null, or what the callback was given.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtGetThreadIdFromExceptionInfo(info: Place<ExceptionInfo>) -> u32 {
    field(info, |info| info.thread)
}

/// Its device.
///
/// # Safety
///
/// The pointer is null, or what the callback was given.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtGetDeviceIdFromExceptionInfo(info: Place<ExceptionInfo>) -> u32 {
    field(info, |info| info.device)
}

/// How it failed.
///
/// # Safety
///
/// The pointer is null, or what the callback was given.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtGetErrorCodeFromExceptionInfo(info: Place<ExceptionInfo>) -> u32 {
    field(info, |info| info.status)
}
