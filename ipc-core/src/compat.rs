//! Names of before, which forward to the present ones. Nothing else in the crate uses them but the guard of a ring, so the file
//! can be deleted once no caller is left.

#![allow(unsafe_code, reason = "views received exports as received bundles")]

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::backend::Access;
use crate::backend::interop::DeviceOwner;
use crate::backend::stream::{AsStream, BorrowedStream};
use crate::ipc::Ipc;
use crate::model::device::{DeviceIdentity, DeviceOrdinal};
use crate::model::error::{DescriptorError, Error, Result};
use crate::model::lease::Holders;
use crate::model::placement::DeviceMap;
use crate::model::tensor::TensorLayout;
use crate::os::process::ProcessIdentity;
use crate::patterns::channel::{Message, OpenReceived, Received, ReceivedExport};
use crate::patterns::ring::RingReadSlot;
use crate::sharing::export::{Export, Hanging, MemoryId, ShareBuilder, TensorSet};
use crate::sharing::import::{Mapping, OpenBuilder, Tensor};
use crate::sharing::{ErrorWith, Session};
use crate::wire::descriptor::{
    Descriptor, DescriptorView, ExportId, MAX_REGIONS_ALLOCATIONS, MAX_REGIONS_SECTIONS, TEXT_PREFIX,
};

#[doc(hidden)]
pub type BundleError = ErrorWith<TensorSet>;
#[doc(hidden)]
pub type ReleaseError<M = Mapping> = ErrorWith<M>;
#[doc(hidden)]
pub type RingReleaseError = ErrorWith<RingReadSlot>;
#[doc(hidden)]
pub type ShareError<O> = ErrorWith<O>;
#[doc(hidden)]
pub type RingDescriptor = Descriptor;
#[doc(hidden)]
pub type ReceivedTensor = ReceivedExport;
#[doc(hidden)]
pub const BUNDLE_TEXT_PREFIX: &str = TEXT_PREFIX;
#[doc(hidden)]
pub const RING_TEXT_PREFIX: &str = TEXT_PREFIX;
#[doc(hidden)]
pub const MAX_BUNDLE_PARTS: usize = MAX_REGIONS_SECTIONS;
#[doc(hidden)]
pub const MAX_BUNDLE_ALLOCATIONS: usize = MAX_REGIONS_ALLOCATIONS;

impl<T> ErrorWith<T> {
    #[doc(hidden)]
    pub fn into_owner(self) -> T {
        self.into_inner()
    }

    #[doc(hidden)]
    pub fn into_mapping(self) -> T {
        self.into_inner()
    }

    #[doc(hidden)]
    pub fn into_slot(self) -> T {
        self.into_inner()
    }
}

impl ErrorWith<TensorSet> {
    #[doc(hidden)]
    pub fn into_builder(self, ipc: &Ipc) -> BundleBuilder<'_> {
        BundleBuilder::with_set(ipc.session(), self.into_inner())
    }
}

macro_rules! descriptor {
    ($name:ident, $is_it:expr, $expected:literal) => {
        #[doc(hidden)]
        #[derive(Clone, PartialEq, Eq)]
        pub struct $name(pub(crate) Descriptor);

        impl $name {
            pub fn to_bytes(&self) -> Vec<u8> {
                self.0.to_bytes()
            }

            pub fn from_bytes(bytes: &[u8]) -> Result<Self, DescriptorError> {
                Self::of(Descriptor::from_bytes(bytes)?)
            }

            fn of(descriptor: Descriptor) -> Result<Self, DescriptorError> {
                if $is_it(&descriptor) {
                    return Ok(Self(descriptor));
                }
                let remedy = "open it by Ipc::open";
                Err(DescriptorError::Kind { expected: $expected, found: "other memory", remedy })
            }

            pub fn backend(&self) -> &str {
                self.0.backend()
            }

            pub fn access(&self) -> Access {
                self.0.access()
            }

            pub fn view(&self) -> DescriptorView<'_> {
                self.0.view()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl std::str::FromStr for $name {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self> {
                Ok(Self::of(text.parse()?)?)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                self.0.serialize(serializer)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                Self::of(Descriptor::deserialize(deserializer)?).map_err(serde::de::Error::custom)
            }
        }
    };
}

descriptor!(BundleDescriptor, Descriptor::is_named, "named tensors");

impl Descriptor {
    #[doc(hidden)]
    pub fn slots(&self) -> u32 {
        self.ring().map_or(0, |ring| ring.slots())
    }

    #[doc(hidden)]
    pub fn slot_bytes(&self) -> u64 {
        self.ring().map_or(0, |ring| ring.slot_bytes())
    }

    #[doc(hidden)]
    pub fn writer(&self) -> &ProcessIdentity {
        self.exporter()
    }
}

impl BundleDescriptor {
    pub fn exporter(&self) -> &ProcessIdentity {
        self.0.exporter()
    }

    pub fn homes(&self) -> impl ExactSizeIterator<Item = DeviceIdentity> {
        self.0.homes()
    }

    pub fn exports(&self) -> impl ExactSizeIterator<Item = ExportId> {
        self.0.exports()
    }

    pub fn allocations(&self) -> usize {
        self.0.allocations()
    }

    pub fn len(&self) -> usize {
        self.0.tensors().len()
    }

    pub fn is_empty(&self) -> bool {
        false
    }

    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, &TensorLayout)> {
        self.0.tensors()
    }

    pub fn layout(&self, name: &str) -> Option<&TensorLayout> {
        self.0.layout_of(name)
    }

    pub fn home(&self, name: &str) -> Option<DeviceIdentity> {
        self.0.home_of(name)
    }
}

#[doc(hidden)]
#[must_use = "nothing is shared before BundleBuilder::start"]
#[derive(Debug)]
pub struct BundleBuilder<'a> {
    session: &'a Session,
    set: TensorSet,
    access: Access,
    ready: Vec<BorrowedStream<'a>>,
}

impl<'a> BundleBuilder<'a> {
    const fn with_set(session: &'a Session, set: TensorSet) -> Self {
        Self { session, set, access: Access::ReadWrite, ready: Vec::new() }
    }

    pub fn memory<M, O: DeviceOwner<M>>(&mut self, owner: O) -> MemoryId {
        self.set.memory(owner)
    }

    pub fn tensor(
        &mut self,
        name: impl AsRef<str>,
        memory: MemoryId,
        offset_bytes: u64,
        layout: TensorLayout,
    ) -> Result<()> {
        self.set.tensor(name, memory, offset_bytes, layout)
    }

    pub fn owned<M, O: DeviceOwner<M>>(
        &mut self,
        name: impl AsRef<str>,
        owner: O,
        layout: Option<TensorLayout>,
    ) -> Result<MemoryId, ErrorWith<O>> {
        self.set.owned(name, owner, layout)
    }

    pub const fn access(mut self, access: Access) -> Self {
        self.access = access;
        self
    }

    pub fn ready_on<M>(mut self, stream: &'a impl AsStream<M>) -> Self {
        self.ready.push(stream.as_stream());
        self
    }

    pub fn start(self) -> Result<BundleExport, BundleError> {
        let builder = ShareBuilder::of_tensors(self.session, self.set).access(self.access);
        let builder = self.ready.iter().fold(builder, |builder, stream| builder.ready_on(stream));
        let export = builder.start()?;
        Ok(BundleExport { descriptor: BundleDescriptor(export.descriptor().clone()), export })
    }
}

#[doc(hidden)]
#[derive(Debug)]
#[must_use = "dropping the bundle ends it"]
pub struct BundleExport {
    descriptor: BundleDescriptor,
    export: Export,
}

impl BundleExport {
    pub const fn descriptor(&self) -> &BundleDescriptor {
        &self.descriptor
    }

    pub fn holders(&self) -> Holders {
        self.export.holders()
    }

    pub fn wait_released(&self, timeout: Duration) -> Result<()> {
        self.export.wait_released(timeout)
    }

    pub fn close(self, timeout: Duration) -> Result<()> {
        self.export.close(timeout)
    }

    pub fn close_with(self, timeout: Duration, hanging: Hanging) -> Result<()> {
        self.export.close_with(timeout, hanging)
    }
}

macro_rules! places {
    ($builder:ident, $inner:ident) => {
        impl<'a> $builder<'a> {
            pub const fn access(mut self, access: Access) -> Self {
                self.0 = self.0.access(access);
                self
            }

            pub const fn timeout(mut self, timeout: Duration) -> Self {
                self.0 = self.0.timeout(timeout);
                self
            }

            pub fn at_home(self) -> Result<BundleMapping> {
                self.0.at_home().map(BundleMapping::new)
            }

            pub fn on_device(self, device: impl Into<DeviceOrdinal>) -> Result<BundleMapping> {
                self.0.on_device(device).map(BundleMapping::new)
            }

            pub fn on<M>(self, stream: &impl AsStream<M>) -> Result<BundleMapping> {
                self.0.on(stream).map(BundleMapping::new)
            }
        }
    };
}

#[doc(hidden)]
#[must_use = "nothing is opened before at_home, on_device, on or mapped_by"]
#[derive(Debug)]
pub struct BundleOpenBuilder<'a>(OpenBuilder<'a>);

places!(BundleOpenBuilder, OpenBuilder);

impl BundleOpenBuilder<'_> {
    pub fn mapped_by(self, map: &DeviceMap) -> Result<BundleMapping> {
        self.0.mapped_by(map).map(BundleMapping::new)
    }
}

#[doc(hidden)]
#[must_use = "nothing is opened before mapped, at_home, on_device or on"]
#[derive(Debug)]
pub struct OpenReceivedBundle<'a>(OpenReceived<'a>);

places!(OpenReceivedBundle, OpenReceived);

impl OpenReceivedBundle<'_> {
    pub fn mapped(self) -> Result<BundleMapping> {
        self.0.mapped().map(BundleMapping::new)
    }
}

#[doc(hidden)]
#[derive(Debug)]
pub struct BundleMapping {
    mapping: Mapping,
    descriptor: BundleDescriptor,
}

impl BundleMapping {
    fn new(mapping: Mapping) -> Self {
        Self { descriptor: BundleDescriptor(mapping.descriptor().clone()), mapping }
    }

    pub fn len(&self) -> usize {
        self.mapping.tensors().len()
    }

    pub const fn is_empty(&self) -> bool {
        false
    }

    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>> {
        self.mapping.get(name)
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, Tensor<'_>)> {
        self.mapping.tensors()
    }

    pub fn access(&self) -> Access {
        self.mapping.access()
    }

    pub fn is_at_home(&self) -> bool {
        self.mapping.is_at_home()
    }

    pub fn devices(&self) -> Vec<DeviceOrdinal> {
        self.mapping.devices()
    }

    pub const fn descriptor(&self) -> &BundleDescriptor {
        &self.descriptor
    }

    pub fn wait_ready<M>(&self, stream: &impl AsStream<M>) -> Result<()> {
        self.mapping.wait_ready(stream)
    }

    pub fn on_gone(&self, callback: impl FnOnce(&Error) + Send + 'static) {
        self.mapping.on_gone(callback);
    }

    pub fn release<M>(self, stream: &impl AsStream<M>) -> Result<(), ErrorWith<Self>> {
        let Self { mapping, descriptor } = self;
        mapping.release(stream).map_err(|failed| failed.map(|mapping| Self { mapping, descriptor }))
    }
}

#[doc(hidden)]
#[repr(transparent)]
#[derive(Debug)]
pub struct ReceivedBundle(ReceivedExport);

impl ReceivedBundle {
    pub fn descriptor(&self) -> BundleDescriptor {
        BundleDescriptor(self.0.descriptor().clone())
    }

    pub fn device(&self, home: DeviceIdentity) -> Option<DeviceOrdinal> {
        self.0.device_for(home)
    }

    pub fn open(&self) -> OpenReceivedBundle<'_> {
        OpenReceivedBundle(self.0.open())
    }
}

impl Received {
    fn unnamed(&self) -> usize {
        self.exports().partition_point(|export| !export.descriptor().is_named())
    }

    #[doc(hidden)]
    pub fn tensors(&self) -> &[ReceivedTensor] {
        &self.exports()[..self.unnamed()]
    }

    #[doc(hidden)]
    pub fn bundles(&self) -> &[ReceivedBundle] {
        let named = &self.exports()[self.unnamed()..];
        // SAFETY: one is a transparent wrapper of the other, so a slice of one is a slice of the other.
        unsafe { std::slice::from_raw_parts(named.as_ptr().cast(), named.len()) }
    }

    #[doc(hidden)]
    pub fn into_tensors(self) -> Vec<ReceivedTensor> {
        self.into_parts().0
    }

    #[doc(hidden)]
    pub fn into_parts(self) -> (Vec<ReceivedTensor>, Vec<ReceivedBundle>) {
        let at = self.unnamed();
        let mut tensors = self.into_exports();
        let named = tensors.split_off(at);
        (tensors, named.into_iter().map(ReceivedBundle).collect())
    }
}

impl<'a> Message<'a> {
    #[doc(hidden)]
    pub fn tensor(self, export: &'a Export) -> Self {
        self.export(export)
    }

    #[doc(hidden)]
    pub fn bundle(self, bundle: &'a BundleExport) -> Self {
        self.export(&bundle.export)
    }
}

impl Ipc {
    #[doc(hidden)]
    pub fn bundle(&self) -> BundleBuilder<'_> {
        BundleBuilder::with_set(self.session(), self.tensors())
    }

    #[doc(hidden)]
    pub fn open_bundle<'a>(&'a self, descriptor: &'a BundleDescriptor) -> BundleOpenBuilder<'a> {
        BundleOpenBuilder(self.open(&descriptor.0))
    }
}
