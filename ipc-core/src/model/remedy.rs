//! What a user can do about an error, as values: each front end has its own text for each of them, because a method of Rust means
//! nothing to a user of another language.

use std::fmt;
use std::sync::OnceLock;

static TEXTS: OnceLock<fn(Remedy) -> &'static str> = OnceLock::new();

macro_rules! remedies {
    ($($(#[doc = $doc:literal])+ $name:ident => $text:literal,)+) => {
        /// An action that an error recommends. Its text is that of Rust, unless the process's front end has set its own.
        ///
        /// The enum is exhaustive on purpose: a front end matches all values, so that one without a text does not compile.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[expect(clippy::exhaustive_enums, reason = "a front end has a text for each")]
        pub enum Remedy {
            $($(#[doc = $doc])+ $name,)+
            /// An action that only the backend knows, which brings the texts.
            OfBackend(&'static BackendRemedy),
        }

        impl Remedy {
            /// All remedies, except for those of the backends.
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// Returns the text for users of Rust.
            const fn in_rust(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)+
                    Self::OfBackend(remedy) => remedy.rust,
                }
            }
        }
    };
}

/// The texts of a remedy for one vendor's devices, by the language of the user.
#[derive(Debug, PartialEq, Eq, Hash)]
#[expect(
    clippy::exhaustive_structs,
    reason = "a front end is a new question that every backend has to answer"
)]
pub struct BackendRemedy {
    /// The text for users of Rust.
    pub rust: &'static str,
    /// The text for users of Python.
    pub python: &'static str,
}

remedies! {
    /// Make a backend of the requested name available.
    EnableBackend => "enable the feature of that name, or register the backend",
    /// Make any backend available.
    EnableAnyBackend => "enable the feature of one, or register one",
    /// Select a simulated backend in another way than by the environment.
    AllowSimulated => "or allow them (Ipc::builder().allow_simulated(true))",
    /// Use the backend that the object belongs to.
    UseItsBackend => "open it with an entry point of that backend (Ipc::named)",
    /// Forward the descriptor of opened memory.
    ForwardDescriptor => "forward the descriptor it was opened with (Mapping::descriptor)",
    /// Open the memory on a visible device, as a copy if need be.
    OpenOnVisibleDevice => "open the memory on a visible device (OpenBuilder::on_device), as a copy if there is no peer access \
                            (OpenBuilder::copy with CopyPolicy::StagedIfNeeded)",
    /// Open the memory on its home device, or as a copy.
    OpenAtHomeOrStaged => "open it on its home device (OpenBuilder::at_home), or copy it through the host \
                           (OpenBuilder::copy with CopyPolicy::StagedIfNeeded)",
    /// Add a device to the device map.
    InsertIntoDeviceMap => "add one with DeviceMap::insert",
    /// Name a device by its identity.
    NameByIdentity => "name it by its identity (Descriptor::home)",
    /// Share a copy.
    ShareCopy => "share a copy (ShareBuilder::exposure(ExposurePolicy::Copy))",
    /// Permit the access on both sides.
    PermitAccess => "share it with ShareBuilder::access, and open it with OpenBuilder::access",
    /// Start the child without fork.
    SpawnChild => "spawn the child (std::process::Command, or multiprocessing with the start method \"spawn\") instead",
    /// Take slots after their publication only.
    TakePublishedSlots => "take published slots only (RingReader::next)",
    /// Release a slot.
    ReleaseOldestSlot => "release the oldest first (RingReadSlot::release)",
    /// Open the ring.
    JoinRing => "open the ring again (Ipc::open_ring)",
    /// Request a timeline in the importer.
    RequestTimeline => "importers request theirs by Mapping::timeline",
    /// Open memory that is not a ring.
    OpenMemory => "open it by Ipc::open",
    /// Open a ring.
    OpenRing => "open it by Ipc::open_ring",
    /// Wait before a slot is written.
    WaitWritable => "call Ring::wait_writable before writing the slot",
    /// Copy the memory over the network.
    CopyOverNetwork => "copy it over the network (OpenBuilder::copy with CopyPolicy::PulledIfNeeded, on an Ipc with IpcBuilder::remote)",
    /// Let the exporter listen for importers of other hosts.
    ListenForRemote => "the exporter has to listen for other hosts (IpcBuilder::remote, Remote::listen)",
    /// Set a transfer engine.
    SetTransferEngine => "set one with IpcBuilder::remote",
    /// Use one transfer engine on both sides.
    UseOneEngine => "use the same engine on both sides (Remote::new)",
    /// Use the shared address, or a copy through the host.
    UseSharedAddress => "use the address that was shared, or take a copy (OpenBuilder::copy with CopyPolicy::Staged)",
    /// Open the ring in place.
    OpenRingInPlace => "open the ring without CopyPolicy::Pulled",
    /// Allow the user in the process that refuses it.
    AllowUser => "allow that user there with IpcBuilder::allow",
    /// Use one key on both sides.
    UseOneKey => "use the same key in Ipc::listen_tcp and Ipc::connect_tcp",
    /// Connect on another thread.
    ConnectOnThread => "call ConnectBuilder::start on another thread",
    /// State the element type.
    StateDtype => "call ShareBuilder::dtype as well",
    /// State the shape.
    StateShape => "state the shape of the tensor (ShareBuilder::shape, or a layout for TensorSet::owned)",
    /// Allow the peer's user in this process.
    AllowUserHere => "allow that user with IpcBuilder::allow",
    /// Allocate memory that importers can open read-only.
    AllocateReadOnly => "Ipc::allocate_for with MemoryUse::read_only_importers",
    /// Allocate memory that importers can map at addresses that they keep.
    AllocateRemappable => "have the exporter allocate it with Ipc::allocate_for and MemoryUse::remappable",
    /// Reserve addresses that are free in all processes of a group.
    ReserveElsewhere => "agree on another address in all processes, far from those that drivers choose, such as 16 TiB (1 << 44)",
    /// Open the memory as a copy.
    OpenStaged => "take a copy (OpenBuilder::copy with CopyPolicy::StagedIfNeeded)",
    /// Allocate memory with a handle of another kind.
    AllocateAs => "allocate it as the other kind (DeviceMemory::allocate_as)",
    /// State the allocation.
    StateAllocation => "state the allocation with Region::new(..).with_allocation(range)",
    /// Take tensors by their names.
    TakeByName => "take one by Mapping::get, or all by Mapping::tensors",
    /// Use the bytes of a region without an element type.
    TakeBytes => "take Mapping::view, or have the exporter call ShareBuilder::dtype",
    /// Take the only region, which has no name.
    TakeUnnamed => "take it by Mapping::tensor",
    /// Share a copy of memory that cannot be shared itself.
    ShareCopyOfMemory => "share a copy (Ipc::share_copy)",
}

impl Remedy {
    /// Sets the texts of this process's front end, for all errors that are made from now on. Returns whether they were set: the
    /// first call decides.
    #[doc(hidden)]
    pub fn set_texts(texts: fn(Self) -> &'static str) -> bool {
        TEXTS.set(texts).is_ok()
    }
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(TEXTS.get().map_or_else(|| self.in_rust(), |texts| texts(*self)))
    }
}
