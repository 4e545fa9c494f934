//! Channels: messages of bytes and memory between two processes.

use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use device_ipc::{ChannelReceiver, ChannelSender, Ipc, Key, Message, TrySendError};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::error::OrRaise as _;
use crate::export::{Descriptor, Export};
use crate::mapping::Mapping;
use crate::mapping_inner::MappingInner;
use crate::open::{Place, device_map};
use crate::recent;
use crate::session::{access, check_fork, copy_policy, ipc_for_users, not_picklable, note_use};
use crate::stream::StreamArg;
use crate::tensor::device_name;
use crate::wait::{self, DEFAULT};

/// Listens for channels under a name.
#[pyclass(frozen, weakref, module = "device_ipc")]
pub(crate) struct Listener {
    listener: Mutex<Option<Arc<device_ipc::Listener>>>,
    name: String,
    ipc: Ipc,
}

impl Listener {
    fn get(&self) -> PyResult<Arc<device_ipc::Listener>> {
        check_fork()?;
        let listener = self.listener.lock().unwrap_or_else(PoisonError::into_inner).clone();
        listener.ok_or_else(|| PyValueError::new_err("the listener is closed"))
    }
}

#[pymethods]
impl Listener {
    /// The name.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// The socket address; of a listener with a key, that to which processes of other hosts connect.
    #[getter]
    fn address(&self) -> PyResult<String> {
        Ok(self.get()?.address())
    }

    /// Waits for a process that connects.
    ///
    /// `timeout` is in seconds; 0 makes one attempt, `None` is no limit. Raises `TimeoutError` after it, and `ValueError`
    /// if the listener is closed.
    #[pyo3(signature = (timeout=None))]
    fn accept(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Channel> {
        let limit = wait::limit(timeout)?;
        let listener = self.get()?;
        let channel = if limit.is_zero() {
            wait::try_once(py, "a connection", || listener.try_accept())?
        } else {
            drop(listener);
            let listening = || self.listener.lock().unwrap_or_else(PoisonError::into_inner).clone();
            wait::while_open(py, limit, "listener", listening, device_ipc::Listener::accept)?
        };
        Ok(Channel::new(channel, &self.ipc))
    }

    /// A descriptor that is readable when `accept(timeout=0)` has something to do.
    fn fileno(&self) -> PyResult<RawFd> {
        Ok(self.get()?.as_raw_fd())
    }

    /// Stops listening: the waits of other threads for the listener end, and the name is free. Channels stay open.
    fn close(slf: &Bound<'_, Self>) -> PyResult<()> {
        check_fork()?;
        let listener = slf.get().listener.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(listener) = listener {
            drop(wait::sole(slf.py(), listener));
        }
        wait::wake_tasks(slf)
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(slf: &Bound<'_, Self>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        Self::close(slf)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("a Listener", "send its name, and connect there"))
    }

    fn __repr__(&self) -> String {
        format!("<device_ipc.Listener {:?}>", self.name)
    }
}

/// A connection to one process, for messages of bytes and memory. Memory that was sent may be dropped at once: the message keeps
/// it until the receiver has opened or discarded it.
#[pyclass(frozen, weakref, module = "device_ipc")]
pub(crate) struct Channel {
    sender: ChannelSender,
    receiver: ChannelReceiver,
    program: String,
    closed: AtomicBool,
    ipc: Ipc,
}

impl Channel {
    fn new(channel: device_ipc::Channel, ipc: &Ipc) -> Self {
        let program = channel.program().to_owned();
        let (sender, receiver) = channel.split();
        note_use();
        Self { sender, receiver, program, closed: AtomicBool::new(false), ipc: ipc.clone() }
    }

    fn check(&self) -> PyResult<()> {
        check_fork()?;
        if self.closed.load(Ordering::Acquire) {
            return Err(PyValueError::new_err("the channel is closed"));
        }
        Ok(())
    }

    pub(crate) fn sender(&self) -> PyResult<&ChannelSender> {
        self.check().map(|()| &self.sender)
    }

    pub(crate) fn receiver(&self) -> PyResult<&ChannelReceiver> {
        self.check().map(|()| &self.receiver)
    }
}

/// Memory in a message.
enum Part {
    Export(Arc<device_ipc::Export>),
    Descriptor(device_ipc::Descriptor),
}

#[pymethods]
impl Channel {
    /// Sends bytes and memory: exports, descriptors, tensors, or mappings of names to tensors. Waits for room where the receiver
    /// is behind. The memory of a reply to a received message uses the inverse of that message's device map.
    ///
    /// `data` are the bytes of the message, `memory` what it brings. `ready` is the stream whose work so far writes the
    /// bytes of the memory; by default the framework's current one for tensors. `reply_to` is the received message that
    /// this one answers. `timeout` limits the wait for room, in seconds; 0 makes one attempt, `None` is no limit.
    ///
    /// Raises `TimeoutError` if there is no room in time, `GoneError` if the peer has closed the channel or ended,
    /// `LayoutError` for a message that is too long, and `ValueError` if this side has closed the channel.
    #[pyo3(signature = (data=None, *memory, ready=None, reply_to=None, timeout=None))]
    fn send(
        &self,
        py: Python<'_>,
        data: Option<&[u8]>,
        memory: &Bound<'_, PyTuple>,
        ready: Option<&Bound<'_, PyAny>>,
        reply_to: Option<&Bound<'_, Received>>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        self.check()?;
        let mut parts = Vec::with_capacity(memory.len());
        let mut streams: Vec<StreamArg> = ready
            .map(|ready| StreamArg::parse(ready, &self.ipc, 0.into()))
            .into_iter()
            .collect::<PyResult<_>>()?;
        for item in memory {
            parts.push(if let Ok(export) = item.cast::<Export>() {
                Part::Export(export.get().get()?)
            } else if let Ok(descriptor) = item.cast::<Descriptor>() {
                Part::Descriptor(descriptor.get().descriptor.clone())
            } else if let Some((export, ipc, device)) = recent::export_of(&item)? {
                if ready.is_none() && streams.iter().all(|stream| stream.device() != device) {
                    streams.extend(StreamArg::of_torch(py, &ipc, device)?);
                }
                Part::Export(export)
            } else {
                Part::Export(crate::share::share(py, &item, None, "rw", ready, "allow", None)?.get()?)
            });
        }
        let mut message = Message::new().bytes(data.unwrap_or_default());
        for part in &parts {
            message = match part {
                Part::Export(export) => message.export(&**export),
                Part::Descriptor(descriptor) => message.descriptor(descriptor),
            };
        }
        for stream in &streams {
            message = message.ready_on(stream);
        }
        let asked = reply_to.map(|message| &*message.get().received);
        let try_send = |message| match asked {
            Some(asked) => asked.try_reply(message),
            None => self.sender.try_send(message),
        };
        let attempt = || match try_send(message.clone()) {
            Ok(()) => Ok(Some(())),
            Err(TrySendError::Full(_)) => Ok(None),
            Err(TrySendError::Failed(error)) => Err(error),
        };
        let call = |slice| match asked {
            Some(asked) => asked.reply(message.clone(), slice),
            None => self.sender.send(message.clone(), slice),
        };
        wait::try_or_wait(py, wait::limit(timeout)?, "room for the message", attempt, call)
    }

    /// A descriptor that becomes readable when `send(timeout=0)`, which has found no room, may find room.
    fn send_fileno(&self) -> RawFd {
        self.sender.as_raw_fd()
    }

    /// Waits for the next message.
    ///
    /// `timeout` is in seconds; 0 makes one attempt, `None` is no limit. Raises `TimeoutError` after it, `GoneError` if
    /// the peer has closed the channel or ended and no message is left, and `ValueError` if this side has closed the
    /// channel.
    #[pyo3(signature = (timeout=None))]
    fn receive(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Received> {
        self.check()?;
        let attempt = || self.receiver.try_receive();
        let call = |slice| self.receiver.receive(slice);
        let received = wait::try_or_wait(py, wait::limit(timeout)?, "a message", attempt, call)?;
        Ok(Received::new(received, &self.ipc))
    }

    /// A descriptor that is readable when `receive(timeout=0)` has a message, or the end of the channel to report. Once it is in
    /// use, every message costs a system call.
    fn fileno(&self) -> RawFd {
        self.receiver.as_raw_fd()
    }

    /// Ends the channel, and waits until the peer has the messages that were sent.
    ///
    /// `timeout` is in seconds; `None` is no limit. Raises `TimeoutError` after it; the channel is closed in any case.
    #[pyo3(signature = (timeout=30.0))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        check_fork()?;
        let limit = wait::limit(timeout)?;
        if self.closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        wait::interruptible(py, || self.sender.close(limit))?.or_raise(py)
    }

    /// The process id of the peer, in its own pid namespace.
    #[getter]
    fn peer(&self) -> u32 {
        self.sender.peer().pid
    }

    /// The program of the peer.
    #[getter]
    fn program(&self) -> &str {
        &self.program
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*exception))]
    fn __exit__(&self, py: Python<'_>, exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        if exception.get_item(0).is_ok_and(|class| !class.is_none()) {
            self.closed.store(true, Ordering::Release);
            return py.detach(|| self.sender.close(Duration::ZERO)).or_raise(py);
        }
        self.close(py, Some(DEFAULT))
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("a Channel", "connect in the other process"))
    }

    fn __repr__(&self) -> String {
        if self.check().is_err() {
            return "<device_ipc.Channel, closed>".into();
        }
        format!("<device_ipc.Channel to process {} ({})>", self.peer(), self.program)
    }
}

/// A message: its bytes, and its memory.
#[pyclass(frozen, weakref, module = "device_ipc")]
pub(crate) struct Received {
    received: Arc<device_ipc::Received>,
    ipc: Ipc,
}

impl Received {
    fn new(received: device_ipc::Received, ipc: &Ipc) -> Self {
        Self { received: Arc::new(received), ipc: ipc.clone() }
    }
}

#[pymethods]
impl Received {
    /// The bytes.
    #[getter]
    fn data<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.received.bytes())
    }

    /// The memory, in the order in which it was sent.
    #[getter]
    fn exports(&self) -> Vec<ReceivedExport> {
        let export =
            |index| ReceivedExport { received: Arc::clone(&self.received), index, ipc: self.ipc.clone() };
        (0..self.received.exports().len()).map(export).collect()
    }

    /// Raises an exception if the sender died before it wrote the memory of this message. Call it when the work that reads the
    /// memory has finished.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.received.check()).or_raise(py)
    }

    /// Opens the only memory of the message; see `ReceivedExport.open`.
    ///
    /// `device` is a device here, such as `"cuda:1"`, or a dict from the exporter's devices to devices here; by default
    /// the memory's home device. `access` is `"r"` or `"rw"`; by default that of the export. `stream` is the stream that
    /// waits until the bytes are ready, by default the framework's current one on `device`; without a stream this call
    /// waits. `copy` is the condition of a copy, and the way, as in `device_ipc.open`. `timeout` limits the wait for the exporter, in seconds; `None` is no
    /// limit. `allow_read_only` permits DLPack capsules of read-only memory for frameworks that ignore that flag.
    ///
    /// Raises `StaleError` if the export has ended, `GoneError` if its process has, `PlacementError` if the device cannot
    /// reach the memory, `NotPermittedError` if the access or this user is not permitted, `TimeoutError` after `timeout`
    /// seconds, `ForkedError` in a child of fork, and `ValueError` for arguments that are invalid or contradict each
    /// other. `TypeError` if the message has not one export.
    #[pyo3(signature = (*, device=None, access=None, stream=None, copy="never", timeout=30.0, allow_read_only=false))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn open(
        &self,
        py: Python<'_>,
        device: Option<&Bound<'_, PyAny>>,
        access: Option<&str>,
        stream: Option<&Bound<'_, PyAny>>,
        copy: &str,
        timeout: Option<f64>,
        allow_read_only: bool,
    ) -> PyResult<Mapping> {
        let mut exports = self.exports();
        if exports.len() != 1 {
            return Err(PyTypeError::new_err(format!(
                "the message has {} exports; open one of them: received.exports[0].open()",
                exports.len()
            )));
        }
        exports.remove(0).open(py, device, access, stream, copy, timeout, allow_read_only)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("a received message", "send str(received.exports[0].descriptor)"))
    }

    fn __repr__(&self) -> String {
        let (bytes, exports) = (self.received.bytes().len(), self.received.exports().len());
        format!("<device_ipc.Received of {bytes} B and {exports} exports>")
    }
}

/// Memory that came with a message. Dropping the message unopened returns it to the sender.
#[pyclass(frozen, module = "device_ipc")]
pub(crate) struct ReceivedExport {
    received: Arc<device_ipc::Received>,
    index: usize,
    ipc: Ipc,
}

impl ReceivedExport {
    fn export(&self) -> &device_ipc::ReceivedExport {
        &self.received.exports()[self.index]
    }
}

#[pymethods]
impl ReceivedExport {
    /// The descriptor.
    #[getter]
    fn descriptor(&self) -> Descriptor {
        Descriptor { descriptor: self.export().descriptor().clone() }
    }

    /// The device that the device map of the channel names for the memory; `None` if the choice is free.
    #[getter]
    fn device(&self) -> Option<String> {
        self.export().device().map(|device| device_name(self.ipc.backend().info().name, device.get()))
    }

    /// Opens the memory, also if the sender has dropped it since. Without a device, it is opened where the device map of the
    /// channel says, or on its home device.
    ///
    /// `device` is a device here, such as `"cuda:1"`, or a dict from the exporter's devices to devices here; by default
    /// the memory's home device. `access` is `"r"` or `"rw"`; by default that of the export. `stream` is the stream that
    /// waits until the bytes are ready, by default the framework's current one on `device`; without a stream this call
    /// waits. `copy` is the condition of a copy, and the way, as in `device_ipc.open`. `timeout` limits the wait for the exporter, in seconds; `None` is no
    /// limit. `allow_read_only` permits DLPack capsules of read-only memory for frameworks that ignore that flag.
    ///
    /// Raises `StaleError` if the export has ended, `GoneError` if its process has, `PlacementError` if the device cannot
    /// reach the memory, `NotPermittedError` if the access or this user is not permitted, `TimeoutError` after `timeout`
    /// seconds, `ForkedError` in a child of fork, and `ValueError` for arguments that are invalid or contradict each
    /// other.
    #[pyo3(signature = (*, device=None, access=None, stream=None, copy="never", timeout=30.0, allow_read_only=false))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn open(
        &self,
        py: Python<'_>,
        device: Option<&Bound<'_, PyAny>>,
        access: Option<&str>,
        stream: Option<&Bound<'_, PyAny>>,
        copy: &str,
        timeout: Option<f64>,
        allow_read_only: bool,
    ) -> PyResult<Mapping> {
        let (access, copy) = (self::access(access)?, copy_policy(copy)?);
        let mapped = self.export().device();
        let place = match (device, mapped) {
            (None, Some(device)) => Place::On(device),
            _ => Place::parse(py, &self.ipc, device, self.export().descriptor())?,
        };
        let stream = place.stream(py, stream, &self.ipc)?.map(Arc::new);
        let is_mapped = device.is_none() && mapped.is_some();
        let limit = wait::limit(timeout)?;
        let call = || {
            let mut builder = self.export().open().timeout(limit).copy(copy);
            if let Some(access) = access {
                builder = builder.access(access);
            }
            match (&stream, &place) {
                (_, Place::Mapped(map)) => builder.on_mapped_devices(map),
                (Some(stream), _) => builder.on(&**stream),
                (None, _) if is_mapped => builder.on_mapped_devices(&self.export().device_map()),
                (None, Place::Home) => builder.at_home(),
                (None, Place::On(device)) => builder.on_device(*device),
            }
        };
        let mapping = wait::interruptible(py, call)?.or_raise(py)?;
        let backend = self.ipc.backend().info().name;
        Ok(Mapping::new(MappingInner::new(mapping, backend, stream, allow_read_only)))
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("a received export", "send str(export.descriptor)"))
    }

    fn __repr__(&self) -> String {
        format!("<device_ipc.ReceivedExport of {} B>", self.export().descriptor().len())
    }
}

/// Returns the key of a channel between hosts. A short one is refused, since every host can connect to the listener.
fn checked_key(bytes: &[u8]) -> PyResult<Key> {
    Key::new(bytes).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Listens for channels under a name. With a key, the name is a TCP address of this host, and processes of other hosts that know
/// the key connect: `listen("10.0.0.1:29531", key=secret)`.
///
/// Listens for channels under a name on this host, or, with a key, at a TCP address for other hosts.
///
/// `name` is any text that is unique on the host, or `"IP:PORT"`. `key` is the secret of both sides, at least 16 bytes;
/// without one, both are processes of this host. `backend` is `"cuda"`, `"ascend"` or `"mock"`; by default the one with
/// devices. `device_map` is a dict from devices of the peer to devices here, for received memory. `allow_users` lists
/// user ids of permitted peers beside this user; by default none.
///
/// Raises `Error` if the name is in use, `BackendError` if no backend has devices, `ForkedError`
/// in a child of fork, and `ValueError` for an invalid argument.
#[pyfunction]
#[pyo3(signature = (name, *, key=None, backend=None, device_map=None, allow_users=None))]
pub(crate) fn listen(
    py: Python<'_>,
    name: String,
    key: Option<&[u8]>,
    backend: Option<&str>,
    device_map: Option<&Bound<'_, PyDict>>,
    allow_users: Option<Vec<u32>>,
) -> PyResult<Listener> {
    let key = key.map(checked_key).transpose()?;
    let ipc = ipc_for_users(py, backend, &allow_users.unwrap_or_default())?;
    let map = device_map.map(|pairs| self::device_map(py, &ipc, pairs, std::iter::empty())).transpose()?;
    let start = || {
        let builder = match &key {
            None => ipc.listen(&name),
            Some(key) => ipc.listen_tcp(&name, key),
        };
        map.into_iter().fold(builder, device_ipc::ListenBuilder::device_map).start()
    };
    let listener = py.detach(start).or_raise(py)?;
    Ok(Listener { listener: Mutex::new(Some(Arc::new(listener))), name, ipc })
}

/// Connects to the process that listens under a name, or, with a key, at a TCP address of another host.
///
/// `name` is the listener's, or `"IP:PORT"`. `key` is the secret of both sides, at least 16 bytes; without one, both are
/// processes of this host. `backend` is `"cuda"`, `"ascend"` or `"mock"`; by default the one with devices. `device_map`
/// is a dict from devices of the peer to devices here, for received memory. `allow_users` lists user ids of permitted
/// peers beside this user; by default none. `user` is the user id of the listener on this host, by default that of this process;
/// another one must be in `allow_users`. `timeout` limits the wait for a listener and its reply, in seconds; `None` is no limit. With
/// `existing`, a listener that does not exist is not awaited.
///
/// Raises `TimeoutError` after `timeout` seconds, or at once with `existing`, `NotPermittedError` if a side does not permit
/// the other's user or has another key, `GoneError` if the listener has ended, `BackendError` if no backend has devices,
/// and `ValueError` for an invalid argument.
#[pyfunction]
#[pyo3(signature = (name, *, key=None, backend=None, device_map=None, timeout=30.0, allow_users=None, user=None, existing=false))]
#[expect(clippy::too_many_arguments, reason = "keywords of Python")]
pub(crate) fn connect(
    py: Python<'_>,
    name: String,
    key: Option<&[u8]>,
    backend: Option<&str>,
    device_map: Option<&Bound<'_, PyDict>>,
    timeout: Option<f64>,
    allow_users: Option<Vec<u32>>,
    user: Option<u32>,
    existing: bool,
) -> PyResult<Channel> {
    let ipc = ipc_for_users(py, backend, &allow_users.unwrap_or_default())?;
    let map = device_map.map(|pairs| self::device_map(py, &ipc, pairs, std::iter::empty())).transpose()?;
    let (limit, key) = (wait::limit(timeout)?, key.map(checked_key).transpose()?);
    // One attempt: a listener that has just accepted a connection that was given up would have a channel without a peer.
    let call = || {
        let builder = match &key {
            None => ipc.connect(&name),
            Some(key) => ipc.connect_tcp(&name, key),
        };
        let builder = if existing { builder.existing() } else { builder }.timeout(limit);
        let builder = user.into_iter().fold(builder, device_ipc::ConnectBuilder::user);
        map.into_iter().fold(builder, device_ipc::ConnectBuilder::device_map).start()
    };
    let channel = wait::interruptible(py, call)?.or_raise(py)?;
    Ok(Channel::new(channel, &ipc))
}
