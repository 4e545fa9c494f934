//! Bundles that were received.

use std::fmt;
use std::time::Duration;

use super::arrival::{Arrival, Place};
use super::maps::position;
use crate::backend::Access;
use crate::backend::stream::{AsStream, BorrowedStream};
use crate::model::device::{DeviceIdentity, DeviceOrdinal};
use crate::model::error::{Error, Result};
use crate::sharing::bundle::{BundleMapping, BundleOpenBuilder};
use crate::sharing::import::HeldGrant;
use crate::transport::Deadline;
use crate::wire::bundle::BundleDescriptor;

/// A bundle that came with a message. Dropping it unopened gives its memory back to the sender.
pub struct ReceivedBundle {
    arrival: Arrival,
    descriptor: BundleDescriptor,
    /// One for each home device, as of the places.
    grants: Vec<HeldGrant>,
    places: Vec<Place>,
}

impl ReceivedBundle {
    pub(super) const fn new(
        arrival: Arrival,
        descriptor: BundleDescriptor,
        grants: Vec<HeldGrant>,
        places: Vec<Place>,
    ) -> Self {
        Self { arrival, descriptor, grants, places }
    }

    /// What names the bundle. Others may open it too, as long as the export has not been dropped.
    pub const fn descriptor(&self) -> &BundleDescriptor {
        &self.descriptor
    }

    /// The device of this process that the channel's device map opens the tensors of this home on; `None` where it has none,
    /// and the choice is free.
    pub fn device(&self, home: DeviceIdentity) -> Option<DeviceOrdinal> {
        self.homes().find(|(_, known)| *known == home).and_then(|(place, _)| match place {
            Place::On(device) => Some(device),
            Place::Anywhere | Place::Nowhere => None,
        })
    }

    /// Opens it, all of it or nothing, also where the sender has dropped its export since. The grants are used up by the
    /// first open that the sender answers, one for each home device; later opens are those of the plain descriptor.
    pub fn open(&self) -> OpenReceivedBundle<'_> {
        OpenReceivedBundle { bundle: self, access: None, timeout: self.arrival.connection.ipc.patience() }
    }

    /// Where what lives on each device may be opened.
    fn homes(&self) -> impl Iterator<Item = (Place, DeviceIdentity)> {
        self.places.iter().copied().zip(self.descriptor.homes())
    }
}

impl fmt::Debug for ReceivedBundle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceivedBundle")
            .field("descriptor", &self.descriptor)
            .field("places", &self.places)
            .finish_non_exhaustive()
    }
}

/// A bundle's mapping in the making, as [`BundleOpenBuilder`]; see [`ReceivedBundle::open`]. It is made by the method that
/// says where.
#[must_use = "nothing is opened before mapped, at_home, on_device or on"]
#[derive(Debug)]
pub struct OpenReceivedBundle<'a> {
    bundle: &'a ReceivedBundle,
    access: Option<Access>,
    timeout: Duration,
}

impl OpenReceivedBundle<'_> {
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

    /// Opens each tensor on the device that the channel's device map says ([`ReceivedBundle::device`]). Waits on the host
    /// until all are ready.
    ///
    /// # Errors
    ///
    /// [`Error::NotInDeviceMap`]; [`Error::InvalidDeviceMap`] where the channel has none; those of
    /// [`on_device`](Self::on_device).
    pub fn mapped(self) -> Result<BundleMapping> {
        let arrival = &self.bundle.arrival;
        let homes = self.bundle.homes();
        let devices = homes.map(|(place, home)| Ok((home, arrival.mapped(place, home)?)));
        let devices: Vec<_> = devices.collect::<Result<_>>()?;
        let device = |home| devices.iter().find(|(known, _)| *known == home).map(|(_, device)| *device);
        self.open_when_ready(|home, _| device(home).ok_or(Error::NotInDeviceMap { home, peer: None }))
    }

    /// Opens each tensor on the device where it lives. Waits on the host until all are ready.
    ///
    /// # Errors
    ///
    /// As [`BundleOpenBuilder::at_home`], and as [`on_device`](Self::on_device).
    pub fn at_home(self) -> Result<BundleMapping> {
        let connection = &self.bundle.arrival.connection;
        for (place, home) in self.bundle.homes() {
            if let Some(device) = position(&connection.devices, home) {
                self.bundle.arrival.check_place(place, home, device)?;
            }
        }
        let variable = connection.ipc.backend().visible_devices_variable();
        self.open_when_ready(|home, visible| visible.ok_or(Error::HomeNotVisible { home, variable }))
    }

    /// Opens everything on the device at this position. Waits on the host until all is ready.
    ///
    /// # Errors
    ///
    /// As [`BundleOpenBuilder::on_device`]; [`Error::InvalidDeviceMap`] where the channel's map says another device for any
    /// of it; [`Error::PeerGone`] where the sender ended before its streams had written the bytes; [`Error::Timeout`], and
    /// the bundle can be opened later.
    pub fn on_device(self, device: impl Into<DeviceOrdinal>) -> Result<BundleMapping> {
        let device = device.into();
        for (place, home) in self.bundle.homes() {
            self.bundle.arrival.check_place(place, home, device)?;
        }
        self.open_when_ready(|_, _| Ok(device))
    }

    /// Opens everything on the stream's device. The stream waits until it is ready, the host does not.
    ///
    /// # Errors
    ///
    /// As [`BundleOpenBuilder::on`]; [`Error::WrongStream`] where the channel's map says another device than the stream's for
    /// any of it; [`Error::PeerGone`] where the sender ended before its streams had written the bytes.
    pub fn on<M>(self, stream: &impl AsStream<M>) -> Result<BundleMapping> {
        let (arrival, stream) = (&self.bundle.arrival, stream.as_stream());
        for (place, home) in self.bundle.homes() {
            arrival.check_stream(place, home, stream)?;
        }
        // Before the open, which may use up the grants: what fails here can be tried again.
        arrival.wait_ready_on(stream, Deadline::after(self.timeout))?;
        self.open(Some(stream), self.timeout, |_, _| Ok(stream.device()))
    }

    fn open_when_ready(
        &self,
        place: impl Fn(DeviceIdentity, Option<DeviceOrdinal>) -> Result<DeviceOrdinal>,
    ) -> Result<BundleMapping> {
        let deadline = Deadline::after(self.timeout);
        self.bundle.arrival.wait_ready(deadline)?;
        self.open(None, deadline.left(), place)
    }

    fn open(
        &self,
        stream: Option<BorrowedStream<'_>>,
        timeout: Duration,
        place: impl Fn(DeviceIdentity, Option<DeviceOrdinal>) -> Result<DeviceOrdinal>,
    ) -> Result<BundleMapping> {
        let ReceivedBundle { arrival, descriptor, grants, .. } = self.bundle;
        arrival.open(grants, || {
            let builder =
                BundleOpenBuilder::new(&arrival.connection.ipc, descriptor, timeout).by_grants(grants);
            let builder = match self.access {
                Some(access) => builder.access(access),
                None => builder,
            };
            builder.open(stream, place)
        })
    }
}
