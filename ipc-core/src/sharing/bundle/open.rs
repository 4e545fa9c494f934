//! How a bundle is opened.

use std::time::Duration;

use super::mapping::BundleMapping;
use crate::backend::Access;
use crate::backend::stream::{AsStream, BorrowedStream};
use crate::model::device::{DeviceIdentity, DeviceOrdinal};
use crate::model::error::{Error, Result};
use crate::model::placement::DeviceMap;
use crate::sharing::Session;
use crate::sharing::export::check_backend;
use crate::sharing::import::{Held, HeldGrant, OpenExport, Patience};
use crate::wire::bundle::{BundleDescriptor, Contents};
use crate::wire::descriptor::Regions;

/// A bundle's mapping in the making; see [`Ipc::open_bundle`](crate::Ipc::open_bundle). It is made by the method that says where.
#[must_use = "nothing is opened before at_home, on_device, on or mapped_by"]
#[derive(Debug)]
pub struct BundleOpenBuilder<'a> {
    ipc: &'a Session,
    descriptor: &'a BundleDescriptor,
    access: Option<Access>,
    timeout: Duration,
    /// One for each part, where the descriptor came with a message.
    grants: &'a [HeldGrant],
}

/// A part's home, where this process sees it, and the device to open it on.
type Place = (Option<DeviceOrdinal>, DeviceOrdinal);

impl<'a> BundleOpenBuilder<'a> {
    pub(crate) const fn new(ipc: &'a Session, descriptor: &'a BundleDescriptor, timeout: Duration) -> Self {
        Self { ipc, descriptor, access: None, timeout, grants: &[] }
    }

    /// Opens by grants, one for each part, as long as they have not been used.
    pub(crate) const fn by_grants(mut self, grants: &'a [HeldGrant]) -> Self {
        self.grants = grants;
        self
    }

    /// What this process wants to do with the memory; what the exporter permits unless said otherwise.
    pub const fn access(mut self, access: Access) -> Self {
        self.access = Some(access);
        self
    }

    /// How long the exporter may take to answer, and the bytes to be ready where no stream waits for them; for all of the
    /// bundle together.
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Opens each tensor on the device where it lives. Waits on the host until all are ready.
    ///
    /// # Errors
    ///
    /// [`Error::InBundle`] with [`Error::HomeNotVisible`] where this process does not see one of those devices; those of
    /// [`on_device`](Self::on_device).
    pub fn at_home(self) -> Result<BundleMapping> {
        let variable = self.ipc.backend().visible_devices_variable();
        self.open(None, |home, visible| visible.ok_or(Error::HomeNotVisible { home, variable }))
    }

    /// Opens everything on the device at this position in this process's numbering. Waits on the host until all is ready.
    ///
    /// # Errors
    ///
    /// Those of [`OpenBuilder::on_device`](crate::OpenBuilder::on_device): as they are where they concern the exporting
    /// process ([`Error::ExporterGone`], [`Error::OtherHost`], [`Error::Timeout`], …), in an [`Error::InBundle`] that names
    /// the first tensor they concern where it is about memory. Nothing stays open then.
    pub fn on_device(self, device: impl Into<DeviceOrdinal>) -> Result<BundleMapping> {
        let device = device.into();
        self.open(None, |_, _| Ok(device))
    }

    /// Opens everything on the stream's device. The stream waits until it is ready, the host does not.
    ///
    /// # Errors
    ///
    /// [`Error::WrongBackend`] for a stream of another backend; those of [`on_device`](Self::on_device).
    pub fn on<M>(self, stream: &impl AsStream<M>) -> Result<BundleMapping> {
        let stream = stream.as_stream();
        check_backend("the stream", stream.backend(), self.ipc.backend().info().name)?;
        self.open(Some(stream), |_, _| Ok(stream.device()))
    }

    /// Opens each tensor on the device that the map names for its home. Waits on the host until all are ready.
    ///
    /// # Errors
    ///
    /// [`Error::InBundle`] with [`Error::NotInDeviceMap`]; those of [`on_device`](Self::on_device).
    pub fn mapped_by(self, map: &DeviceMap) -> Result<BundleMapping> {
        let ipc = self.ipc;
        self.open(None, |home, _| ipc.mapped_device(map, home))
    }

    /// Opens each part where `place` says, which is told its home and where this process sees that.
    pub(crate) fn open(
        self,
        stream: Option<BorrowedStream<'_>>,
        place: impl Fn(DeviceIdentity, Option<DeviceOrdinal>) -> Result<DeviceOrdinal>,
    ) -> Result<BundleMapping> {
        let patience = Patience::new(self.timeout);
        let contents = self.descriptor.contents();
        check_backend("the bundle", &contents.backend, self.ipc.backend().info().name)?;
        // Before anything is opened.
        let places = self.places(contents, place)?;
        let mut opened = AllOrNothing { parts: Vec::with_capacity(places.len()) };
        for (part, place) in places.into_iter().enumerate() {
            let held = self.open_part(contents, part, place, &patience);
            opened.parts.push(held.map_err(|error| blame(contents, part, None, error))?);
        }
        for (part, held) in opened.parts.iter().enumerate() {
            let ready = match stream {
                Some(stream) => held.wait_ready_on(stream),
                None => held.wait_ready(|| patience.left()),
            };
            ready.map_err(|error| blame(contents, part, None, error))?;
        }
        Ok(BundleMapping::new(self.descriptor.clone(), opened.into_parts()))
    }

    /// Of each part its home, where this process sees it, and the device to open it on.
    fn places(
        &self,
        contents: &Contents,
        place: impl Fn(DeviceIdentity, Option<DeviceOrdinal>) -> Result<DeviceOrdinal>,
    ) -> Result<Vec<Place>> {
        let devices = self.ipc.devices()?;
        let mut places = Vec::with_capacity(contents.parts.len());
        for (index, part) in contents.parts.iter().enumerate() {
            let home =
                devices.iter().find(|device| device.identity == part.home).map(|device| device.ordinal);
            let device = place(part.home, home).map_err(|error| blame(contents, index, None, error))?;
            places.push((home, device));
        }
        Ok(places)
    }

    fn open_part(
        &self,
        contents: &Contents,
        part: usize,
        (home, device): Place,
        patience: &Patience,
    ) -> Result<Held> {
        let named = contents.named(part);
        let access = self.access.unwrap_or(contents.access);
        let opening = OpenExport {
            ipc: self.ipc,
            named,
            device,
            home,
            access,
            patience,
            grant: self.grants.get(part),
            alone: false,
        };
        let held = opening.held(&|region, error| blame(contents, part, Some(region), error))?;
        match check_mapped(&held, named.regions) {
            Ok(()) => Ok(held),
            Err((region, error)) => {
                held.abandon();
                Err(blame(contents, part, Some(region), error))
            }
        }
    }
}

/// What the driver mapped, or the exporter shares, is what the descriptor says; the position of a region where not.
fn check_mapped(held: &Held, regions: Regions<'_>) -> Result<(), (usize, Error)> {
    let mapped = held.regions();
    for (index, region) in regions.iter().enumerate() {
        let wanted = region.iter().map(|extent| extent.size).fold(0, u64::saturating_add);
        let found = mapped.get(index).map_or(0, |range| range.len);
        if found < wanted || mapped.len() != regions.len() {
            return Err((
                index,
                Error::InvalidRegion(format!(
                    "the bundle names {} pieces of memory, this one of {wanted} bytes, and there are {}, this one of {found} \
                 bytes",
                    regions.len(),
                    mapped.len()
                )),
            ));
        }
    }
    Ok(())
}

/// The same error, about the first tensor of that region or part.
fn blame(contents: &Contents, part: usize, region: Option<usize>, error: Error) -> Error {
    match contents.first_tensor(part, region) {
        Some(tensor) => error.of_tensor(tensor.name),
        None => error,
    }
}

/// The parts that are open so far. Where the rest fails, nothing of them stays open that nobody else uses.
struct AllOrNothing {
    parts: Vec<Held>,
}

impl AllOrNothing {
    fn into_parts(mut self) -> Vec<Held> {
        std::mem::take(&mut self.parts)
    }
}

impl Drop for AllOrNothing {
    fn drop(&mut self) {
        self.parts.drain(..).for_each(Held::abandon);
    }
}
