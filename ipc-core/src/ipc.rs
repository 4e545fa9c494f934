//! The entry points of an [`Ipc`], and its builder.

#![allow(unsafe_code, reason = "takes memory on trust that it does not own")]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use device_ipc_tcp::Key;

#[cfg(doc)]
use crate::backend::HandleKind;
use crate::backend::interop::{DeviceOwner, Region};
use crate::backend::select::{BackendStatus, Backends};
use crate::backend::stream::AsStream;
use crate::backend::{Buffer, DeviceIpc, MemoryUse, Stream};
use crate::model::address::DeviceRange;
use crate::model::device::DeviceOrdinal;
use crate::model::error::Result;
use crate::model::tensor::TensorLayout;
use crate::os::environment::nonempty_variable;
use crate::patterns::channel::{Channel, ConnectBuilder, ListenBuilder};
use crate::patterns::keeper::{Keeper, KeeperExport, Search};
use crate::patterns::ring::{RingBuilder, RingReader};
use crate::sharing::export::{Export, ShareBuilder, TensorSet, check_backend, copy_and_wait};
use crate::sharing::import::{OpenBuilder, Reservation};
use crate::sharing::remote::Remote;
use crate::sharing::{Ipc, RecoverableError, allocate};
use crate::transport::AllowList;
use crate::wire::SOCKET_DIR_VARIABLE;
use crate::wire::descriptor::Descriptor;

/// Default timeout for an exporter's answer.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

impl Ipc {
    /// Selects the backend that `DEVICE_IPC_BACKEND` names, or the first one with a device.
    ///
    /// # Errors
    ///
    /// [`Error::NoBackend`](crate::Error::NoBackend) with the reason for each backend.
    pub fn auto() -> Result<Self> {
        Self::builder().auto()
    }

    /// Selects the backend of this name.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownBackend`](crate::Error::UnknownBackend), or [`Error::BackendUnavailable`](crate::Error::BackendUnavailable) with the reason.
    pub fn named(name: &str) -> Result<Self> {
        Self::builder().named(name)
    }

    /// Uses a backend that the caller created.
    pub fn with_backend(backend: Arc<dyn DeviceIpc>) -> Self {
        Self::builder().with_backend(backend)
    }

    /// Returns a builder for settings: backends, permitted users, socket directory, timeout.
    pub fn builder() -> IpcBuilder {
        IpcBuilder::default()
    }

    /// Returns every registered backend with its devices, or the reason why it is unavailable. Creates no context.
    pub fn available() -> Vec<BackendStatus> {
        Backends::registered().available()
    }

    /// Shares memory. The owner is kept until the last importer has released the export, and then dropped on a thread of the
    /// library with the context of the memory's device current.
    ///
    /// Owners are [`Buffer`], an `Arc` of an owner, types with an implementation of [`DeviceOwner`] in a backend's crate
    /// (cudarc's `CudaSlice`), or any address with a value that keeps it allocated ([`OwnedRegion`](crate::OwnedRegion)).
    pub fn share<M, O: DeviceOwner<M>>(&self, owner: O) -> ShareBuilder<'_, O> {
        let region = owner.region();
        ShareBuilder::new(self, owner, region)
    }

    /// Returns an empty set of named tensors, for [`share_all`](Self::share_all).
    pub fn tensors(&self) -> TensorSet {
        TensorSet::new(self.backend())
    }

    /// Shares named tensors, each with its memory and layout: a state dict. Without a layout, a tensor has the owner's element type and
    /// one dimension. For tensors that share memory, and for memory of owners of several types, see [`tensors`](Self::tensors).
    ///
    /// ```
    /// # fn main() -> device_ipc_core::Result<()> {
    /// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1").expect("a valid specification");
    /// # let ipc = device_ipc_core::Ipc::with_backend(backend);
    /// use device_ipc_core::{Dtype, TensorLayout};
    ///
    /// let state_dict = [
    ///     ("weight", ipc.allocate(0, 4096)?, TensorLayout::contiguous(Dtype::F32, [32, 32])?),
    ///     ("bias", ipc.allocate(0, 128)?, TensorLayout::contiguous(Dtype::F32, [32])?),
    /// ];
    /// let export = ipc.share_named(state_dict)?.start()?;
    /// assert_eq!(ipc.open(export.descriptor()).at_home()?.get("bias")?.shape(), [32]);
    /// # let one = || -> device_ipc_core::Result<_> { Ok(("w", ipc.allocate(0, 4)?, TensorLayout::contiguous(Dtype::F32, [1])?)) };
    /// # let error = ipc.share_named([one()?, one()?]).map(drop).unwrap_err();
    /// # assert!(error.to_string().contains("w"), "{error}");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`TensorSet::owned`]. The owners are dropped.
    pub fn share_named<M, O: DeviceOwner<M>>(
        &self,
        tensors: impl IntoIterator<Item = (impl AsRef<str>, O, impl Into<Option<TensorLayout>>)>,
    ) -> Result<ShareBuilder<'_, TensorSet>> {
        let mut set = self.tensors();
        for (name, owner, layout) in tensors {
            set.owned(name, owner, layout.into())?;
        }
        Ok(self.share_all(set))
    }

    /// Shares named tensors, in any number of allocations on any of the devices.
    ///
    /// For any number of tensors, an importer sends one request for each device, and the driver opens each allocation once.
    ///
    /// ```no_run
    /// # use device_ipc_core::{Dtype, Ipc, Result, TensorLayout};
    /// # fn share(ipc: &Ipc) -> Result<()> {
    /// let mut tensors = ipc.tensors();
    /// let layers = tensors.memory(ipc.allocate(0, 4096)?);
    /// tensors.tensor("w", layers, 0, TensorLayout::contiguous(Dtype::F32, [16, 16])?)?;
    /// tensors.tensor("b", layers, 1024, TensorLayout::contiguous(Dtype::F32, [16])?)?;
    /// let export = ipc.share_all(tensors).start()?;
    /// println!("{}", export.descriptor());
    /// # Ok(())
    /// # }
    /// ```
    pub fn share_all(&self, tensors: TensorSet) -> ShareBuilder<'_, TensorSet> {
        ShareBuilder::of_tensors(self, tensors)
    }

    /// Shares memory without an owner that the library could keep: that of an engine with its own allocator.
    ///
    /// If the vendor numbers its allocations (CUDA does), freed memory is detected, also after another allocation has its
    /// address: the exporter checks the memory before every reply, and once more after the importer has opened it, which fails
    /// with [`Error::StaleGeneration`](crate::Error::StaleGeneration) then.
    ///
    /// # Safety
    ///
    /// The region must stay allocated, and must not be given to another owner, until the export has been closed
    /// ([`Export::close`](crate::Export::close) returned without an error).
    pub unsafe fn share_borrowed(&self, region: Region) -> ShareBuilder<'_, ()> {
        ShareBuilder::new(self, (), region).borrowed()
    }

    /// Shares a copy of memory that cannot be shared itself ([`Error::NotShareable`](crate::Error::NotShareable)), or should
    /// not be. The copy is made after the work that was submitted to the stream before, and the host waits for it; later writes
    /// on either side are not visible on the other.
    ///
    /// # Errors
    ///
    /// [`Error::WrongBackend`](crate::Error::WrongBackend), [`Error::OutOfMemory`](crate::Error::OutOfMemory); the vendor's
    /// error.
    pub fn share_copy<M, O: DeviceOwner<M>, S>(
        &self,
        owner: &O,
        stream: &impl AsStream<S>,
    ) -> Result<ShareBuilder<'_, Buffer>> {
        let region = owner.region();
        let stream = stream.as_stream();
        check_backend("the memory", region.backend, self.backend().info().name)?;
        check_backend("the stream", stream.backend(), self.backend().info().name)?;
        let len = region.range.len;
        let copy = self.allocate(region.range.device, len)?;
        if len > 0 {
            copy_and_wait(self, copy.range(), region.range, Some(stream))?;
        }
        let shared = Region { dtype: region.dtype, ..copy.region() };
        Ok(ShareBuilder::new(self, copy, shared))
    }

    /// Opens memory of another process, or of this one: one region, or all named tensors of a descriptor.
    pub fn open<'a>(&'a self, descriptor: &'a Descriptor) -> OpenBuilder<'a> {
        OpenBuilder::new(self, descriptor, self.timeout())
    }

    /// Shares memory as a ring of slots that are written repeatedly, and that several processes read.
    pub fn ring<M, O: DeviceOwner<M>>(&self, owner: O) -> RingBuilder<'_, O> {
        let region = owner.region();
        let share = ShareBuilder::new(self, owner, region);
        RingBuilder::new(share, self.backend(), region, self.timeout())
    }

    /// Opens a ring of another process, or of this one, as a reader.
    ///
    /// The [`timeout`](OpenBuilder::timeout) is also that of [`RingReader::next_ahead`] if
    /// [the host waits](RingReader::waits_on_host). To the errors of [`OpenBuilder`] are added
    /// [`DescriptorError::Kind`](crate::DescriptorError::Kind) for the descriptor of other memory, and
    /// [`Error::Protocol`](crate::Error::Protocol) if the writer's process does not share the memory as a ring.
    ///
    /// # Rings of other hosts
    ///
    /// A [copy policy](OpenBuilder::copy) applies to each publication: it is pulled. A ring is never staged, so that
    /// [`IfNeeded`](crate::CopyPolicy::IfNeeded) and [`Always`](crate::CopyPolicy::Always) only pull, and the policies that only
    /// stage are [`Error::Unsupported`](crate::Error::Unsupported).
    ///
    /// The reader of copies has private slots, as many as the ring, and a thread of the library copies each publication into the next
    /// one as soon as this reader has released it. The writer may reuse its slot when the copy is complete, so it can be ahead of
    /// the reader by twice the number of slots. The reader works as otherwise, with these differences:
    ///
    /// - Errors of the connection and of a copy are [`Error::InPull`](crate::Error::InPull). As after the death of the writer, the reader first receives
    ///   the publications that have arrived. [`Error::Timeout`](crate::Error::Timeout) in an `InPull` means that the writer's process has been silent for
    ///   the timeout, because it is suspended or cannot be reached.
    /// - The writer's [`readers_behind`](crate::Ring::readers_behind) and [`holders`](crate::Ring::holders) contain the
    ///   process id and the program that this process states, with its network address.
    /// - [`Ring::close`](crate::Ring::close) waits until the copies are complete, and not for this reader. A writer whose process
    ///   exits without it ends the ring by [`Error::ExporterGone`](crate::Error::ExporterGone), also if it has dropped the ring.
    /// - A reader that does not answer, because its process is suspended or cannot be reached, delays the writer for
    ///   the timeout, 1 s for each 16 MiB of the ring, and 10 s. Then it is dismissed. One whose process terminates
    ///   leaves the ring at once.
    ///
    /// # Examples
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let ipc = device_ipc_core::Ipc::with_backend(device_ipc_mock::MockBackend::from_spec("devices=1")?);
    /// # let ring = ipc.ring(ipc.allocate(0, 1 << 10)?).start()?;
    /// # let line = ring.descriptor().to_string();
    /// use device_ipc_core::Descriptor;
    ///
    /// let descriptor: Descriptor = line.parse()?;
    /// let stream = ipc.create_stream(0)?;
    /// let reader = ipc.open_ring(&descriptor).on(&stream)?; // on the stream's device
    /// assert_eq!(reader.sequence(), 0);
    /// # Ok(())
    /// # }
    /// ```
    pub fn open_ring<'a>(&'a self, descriptor: &'a Descriptor) -> OpenBuilder<'a, RingReader> {
        OpenBuilder::new(self, descriptor, self.timeout())
    }

    /// Listens for channels under a name; see [`Listener`](crate::Listener).
    pub fn listen<'a>(&'a self, name: &'a str) -> ListenBuilder<'a> {
        ListenBuilder::new(self, name)
    }

    /// Listens for channels of processes of other hosts that know the key, at a TCP address of this host such as
    /// `10.0.0.1:29531`; port 0 takes a free port ([`Listener::address`](crate::Listener::address)).
    ///
    /// Messages are authenticated and not encrypted. The memory of their exports is copied by a transfer engine, on
    /// [trusted networks](crate::Remote#trusted-networks-only) only.
    ///
    /// # Examples
    ///
    /// Two processes of two hosts use the same calls:
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let ipc = device_ipc_core::Ipc::with_backend(device_ipc_mock::MockBackend::from_spec("devices=1")?);
    /// # let timeout = std::time::Duration::from_secs(10);
    /// use device_ipc_core::{Key, Message};
    ///
    /// let key = Key::new(b"at least 16 random bytes")?;
    /// let listener = ipc.listen_tcp("127.0.0.1:0", &key).start()?;
    /// # let (address, other, other_key) = (listener.address(), ipc.clone(), key.clone());
    /// # let connecting = std::thread::spawn(move || other.connect_tcp(&address, &other_key).start());
    /// let channel = listener.accept(timeout)?;
    /// channel.send(Message::new().bytes(b"weights"), timeout)?;
    /// # assert_eq!(connecting.join().expect("no panic")?.receive(timeout)?.bytes(), b"weights");
    /// # Ok(())
    /// # }
    /// ```
    pub fn listen_tcp<'a>(&'a self, address: &'a str, key: &'a Key) -> ListenBuilder<'a> {
        ListenBuilder::new(self, address).with_key(key)
    }

    /// Connects to the process that listens under a name; see [`Channel`](crate::Channel).
    pub fn connect<'a>(&'a self, name: &'a str) -> ConnectBuilder<'a> {
        ConnectBuilder::new(self, name, self.timeout())
    }

    /// Connects to the process that listens at a TCP address, `HOST:PORT`, and knows the key; see
    /// [`listen_tcp`](Self::listen_tcp).
    pub fn connect_tcp<'a>(&'a self, address: &'a str, key: &'a Key) -> ConnectBuilder<'a> {
        ConnectBuilder::new(self, address, self.timeout()).with_key(key)
    }

    /// Lets other processes find an export by a name, as the given version of it; see [`Keeper`]. Accepts `Export` or
    /// `Arc<Export>`.
    ///
    /// The same users may ask for it as may open the export ([`IpcBuilder::allow`]).
    ///
    /// # Errors
    ///
    /// [`RecoverableError`], which gives the export back: [`Error::InvalidInput`](crate::Error::InvalidInput) for a name
    /// that is empty, longer than 48 B, or has other characters than ASCII letters, digits, dots, hyphens and underscores;
    /// [`Error::ChannelNameInUse`](crate::Error::ChannelNameInUse), which names the process that keeps something under it;
    /// [`Error::Forked`](crate::Error::Forked).
    pub fn keep(
        &self,
        name: &str,
        version: u64,
        export: impl Into<Arc<Export>>,
    ) -> Result<Keeper, RecoverableError<Arc<Export>>> {
        Keeper::start(self, name, version, export.into())
    }

    /// Becomes the keeper of a name that the process at the other end of a channel hands over
    /// ([`Keeper::hand_over`]): the name is never free meanwhile, so that no other process can take it.
    ///
    /// # Errors
    ///
    /// As [`keep`](Self::keep), and those of [`ListenBuilder::take_over`].
    pub fn take_over(
        &self,
        channel: &Channel,
        name: &str,
        version: u64,
        export: impl Into<Arc<Export>>,
    ) -> Result<Keeper, RecoverableError<Arc<Export>>> {
        Keeper::take_over(self, channel, name, version, export.into())
    }

    /// Waits until a keeper of the name has answered, and returns its answer; see [`Keeper`]. The name is `llama`, `keeper:llama`, or,
    /// for a keeper of another user than this process, `keeper:1000/llama`. Another user must be allowed with [`IpcBuilder::allow`],
    /// here and in the keeper.
    ///
    /// If a keeper terminates meanwhile, or hands over to another process, the call asks the next one.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](crate::Error::InvalidInput); [`Error::NoListener`](crate::Error::NoListener) if there is no
    /// keeper of this name and user within the timeout; [`Error::Timeout`](crate::Error::Timeout) if it does not answer;
    /// [`Error::NotPermitted`](crate::Error::NotPermitted) if one of the two processes does not allow the other's user;
    /// [`Error::WrongBackend`](crate::Error::WrongBackend); [`Error::Protocol`](crate::Error::Protocol) for another version of the
    /// library; [`Error::OnWorkerThread`](crate::Error::OnWorkerThread); [`Error::Forked`](crate::Error::Forked).
    pub fn find(&self, name: &str, timeout: Duration) -> Result<KeeperExport> {
        Search::new(self, name, timeout).run()
    }

    /// Allocates memory that can be shared read-write, for programs without their own allocator.
    ///
    /// [`allocate_for`](Self::allocate_for) allocates memory with further properties: read-only access of importers, for
    /// example, which the preferred kind of CUDA memory does not have.
    ///
    /// If the device has not enough memory, the call waits for the memory of dropped exports and released mappings that a thread of the
    /// library has yet to free, at most 1 s, and tries once more.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), [`Error::NoSuchDevice`](crate::Error::NoSuchDevice); the vendor's
    /// error.
    pub fn allocate(&self, device: impl Into<DeviceOrdinal>, bytes: u64) -> Result<Buffer> {
        self.allocate_for(device, bytes, MemoryUse::new())
    }

    /// Allocates memory of the preferred kind that fits the use, or of a given [`HandleKind`].
    ///
    /// ```
    /// use device_ipc_core::{Access, Ipc, MemoryUse};
    ///
    /// # fn main() -> device_ipc_core::Result<()> {
    /// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1").expect("a valid specification");
    /// # let ipc = Ipc::with_backend(backend);
    /// let read_only = MemoryUse::new().read_only_importers();
    /// let export = ipc.share(ipc.allocate_for(0, 4096, read_only)?).access(Access::ReadOnly).start()?;
    /// # drop(export);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`allocate`](Self::allocate); [`Error::Unsupported`](crate::Error::Unsupported) if no kind of memory fits, with
    /// the reason for each.
    pub fn allocate_for(
        &self,
        device: impl Into<DeviceOrdinal>,
        bytes: u64,
        wanted: impl Into<MemoryUse>,
    ) -> Result<Buffer> {
        allocate(self.backend(), device.into(), bytes, wanted.into())
    }

    /// Reserves addresses on a device, in which exports are opened side by side
    /// ([`OpenBuilder::reserved_in`](crate::OpenBuilder::reserved_in)). Uses no memory.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a backend without reserved ranges;
    /// [`Error::InvalidRegion`](crate::Error::InvalidRegion) for 0 bytes; [`Error::NoSuchDevice`](crate::Error::NoSuchDevice); the
    /// vendor's error.
    pub fn reserve(&self, device: impl Into<DeviceOrdinal>, bytes: u64) -> Result<Reservation> {
        Reservation::new(self, device.into(), bytes, None)
    }

    /// Reserves these addresses, so that exports that are opened there have equal addresses in several processes: for objects with
    /// pointers in them.
    ///
    /// The processes agree on a range that each of them has free: far from the addresses that drivers choose, at a multiple of 1 GiB,
    /// such as 16 TiB (`1 << 44`). The unit of addresses is 32 MiB on CUDA and 1 GiB on Ascend. Drivers take an address as a hint, and what
    /// one chose in one process is seldom free in another.
    ///
    /// # Errors
    ///
    /// [`Error::AddressesInUse`](crate::Error::AddressesInUse) if a part of the range is not free in this process, after which
    /// nothing is reserved; [`Error::InvalidRegion`](crate::Error::InvalidRegion) for an address that is null or not a multiple of the
    /// unit that the error states; as for [`reserve`](Self::reserve).
    pub fn reserve_at(&self, range: DeviceRange) -> Result<Reservation> {
        Reservation::new(self, range.device, range.len, Some(range.ptr))
    }

    /// Creates a stream, for programs without their own streams.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchDevice`](crate::Error::NoSuchDevice); the vendor's error.
    pub fn create_stream(&self, device: impl Into<DeviceOrdinal>) -> Result<Stream> {
        Stream::create(Arc::clone(self.backend()), device.into())
    }
}

/// A builder for [`Ipc`].
///
/// # Examples
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1")?;
/// let ipc = device_ipc_core::Ipc::builder().timeout(std::time::Duration::from_secs(5)).with_backend(backend);
/// assert_eq!(ipc.devices()?.len(), 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "the backend is chosen by auto, named or with_backend"]
pub struct IpcBuilder {
    backends: Option<Backends>,
    allow_simulated: bool,
    socket_directory: Option<PathBuf>,
    allow: AllowList,
    timeout: Option<Duration>,
    remote: Option<Remote>,
}

impl IpcBuilder {
    /// Selects among these backends instead of all registered ones.
    pub fn backends(mut self, backends: Backends) -> Self {
        self.backends = Some(backends);
        self
    }

    /// Permits [`auto`](Self::auto) to select a backend without hardware (the mock).
    pub const fn allow_simulated(mut self, yes: bool) -> Self {
        self.allow_simulated = yes;
        self
    }

    /// Creates the socket in this directory instead of the abstract namespace, for containers that share a volume but no
    /// network namespace. The default is `DEVICE_IPC_SOCKET_DIR`, unless the environment is [ignored](crate::os::environment).
    pub fn socket_directory(mut self, directory: impl Into<PathBuf>) -> Self {
        self.socket_directory = Some(directory.into());
        self
    }

    /// Permits further users and groups to share with, and to open from; this process's user is always permitted.
    pub fn allow(mut self, allow: AllowList) -> Self {
        self.allow = allow;
        self
    }

    /// Permits copies between hosts with a transfer engine, by default none: see [`Remote`].
    pub fn remote(mut self, remote: Remote) -> Self {
        self.remote = Some(remote);
        self
    }

    /// Sets the timeout for an exporter's answer, by default 30 s.
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Selects the backend that `DEVICE_IPC_BACKEND` names, or the first one with a device.
    ///
    /// # Errors
    ///
    /// As for [`Ipc::auto`].
    pub fn auto(self) -> Result<Ipc> {
        let backend = self.choices().auto()?;
        Ok(self.with_backend(backend))
    }

    /// Selects the backend of this name.
    ///
    /// # Errors
    ///
    /// As for [`Ipc::named`].
    pub fn named(self, name: &str) -> Result<Ipc> {
        let backend = self.choices().named(name)?;
        Ok(self.with_backend(backend))
    }

    /// Uses a backend that the caller created.
    pub fn with_backend(self, backend: Arc<dyn DeviceIpc>) -> Ipc {
        let from_environment = || nonempty_variable(SOCKET_DIR_VARIABLE).map(PathBuf::from);
        let socket_directory = self.socket_directory.or_else(from_environment);
        let timeout = self.timeout.unwrap_or(DEFAULT_TIMEOUT);
        Ipc::new(backend, socket_directory, self.allow, timeout, self.remote)
    }

    fn choices(&self) -> Backends {
        self.backends.clone().unwrap_or_else(Backends::registered).allow_simulated(self.allow_simulated)
    }
}
