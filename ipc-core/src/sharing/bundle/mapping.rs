//! The receiver's guard of a bundle.

use crate::backend::Access;
use crate::backend::stream::{AsStream, BorrowedStream};
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::sharing::ErrorWith;
use crate::sharing::import::{Held, Tensor};
use crate::wire::bundle::BundleDescriptor;

/// A bundle of another process, opened: all of its tensors.
///
/// As with a [`Mapping`](crate::Mapping), the leases end when device work with the memory has finished:
/// [`release`](Self::release) waits for a stream, and a plain drop for everything that had been submitted to the devices
/// before it. Neither makes the caller wait.
#[derive(Debug)]
pub struct BundleMapping {
    descriptor: BundleDescriptor,
    /// One for each home device.
    parts: Vec<Held>,
}

impl BundleMapping {
    pub(super) const fn new(descriptor: BundleDescriptor, parts: Vec<Held>) -> Self {
        Self { descriptor, parts }
    }

    /// How many tensors there are.
    pub fn len(&self) -> usize {
        self.descriptor.len()
    }

    /// Never true: a bundle has at least one tensor.
    pub fn is_empty(&self) -> bool {
        self.descriptor.is_empty()
    }

    /// The tensor of this name.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`].
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>> {
        self.at(self.descriptor.contents().table().find(name)?)
    }

    /// Every tensor under its name, in the order in which the exporter put them in.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, Tensor<'_>)> {
        let tensors = self.descriptor.contents().table().tensors().enumerate();
        tensors.map(|(position, tensor)| {
            let found = self
                .at(position)
                .expect("it was checked when the bundle was opened that it lies in its region");
            (tensor.name, found)
        })
    }

    fn at(&self, position: usize) -> Result<Tensor<'_>> {
        let contents = self.descriptor.contents();
        let (part, region) = contents.place(position);
        let held = &self.parts[part];
        Tensor::of(held, held.regions()[region], contents.table().at(position))
    }

    /// What this process may do with the memory.
    pub fn access(&self) -> Access {
        self.parts[0].access()
    }

    /// Does every tensor lie on the device where its bytes live?
    pub fn is_at_home(&self) -> bool {
        self.parts.iter().all(Held::is_at_home)
    }

    /// The devices in whose address spaces the tensors are, each once.
    pub fn devices(&self) -> Vec<DeviceOrdinal> {
        let mut devices: Vec<_> = self.parts.iter().map(Held::device).collect();
        devices.sort_unstable();
        devices.dedup();
        devices
    }

    /// What the bundle was opened by. Forward it to let a third process open it.
    pub const fn descriptor(&self) -> &BundleDescriptor {
        &self.descriptor
    }

    /// Makes the stream wait, on the device, until all tensors on its device are ready.
    /// [`BundleOpenBuilder::on`](crate::BundleOpenBuilder::on) and the views do so by themselves.
    ///
    /// # Errors
    ///
    /// [`Error::WrongBackend`] and [`Error::WrongStream`] for a stream of a backend or a device without any of the tensors,
    /// else what the vendor says.
    pub fn wait_ready<M>(&self, stream: &impl AsStream<M>) -> Result<()> {
        let stream = stream.as_stream();
        self.check_stream(stream)?;
        for held in self.on_device_of(stream) {
            held.check_process()?;
            held.wait_ready_on(stream)?;
        }
        Ok(())
    }

    /// Has `callback` run, once, when the exporter has ended; at once where it has already. It runs on a thread of the
    /// library, as [`Mapping::on_gone`](crate::Mapping::on_gone), and not at all for memory of this very process or once the
    /// mapping is gone.
    pub fn on_gone(&self, callback: impl FnOnce(&Error) + Send + 'static) {
        self.parts[0].on_gone(callback);
    }

    /// Ends the mapping when the stream gets here: work submitted to it so far may still use the memory. What is mapped on
    /// another device than the stream's ends as by a plain drop, when everything submitted to that device has finished.
    ///
    /// Work on other streams of the device must have been ordered before that, by an event. Does not wait.
    ///
    /// # Errors
    ///
    /// [`ErrorWith`], which gives the mapping back: [`Error::WrongStream`] for a stream of a device on which nothing is
    /// mapped; else as [`Mapping::release`](crate::Mapping::release).
    pub fn release<M>(self, stream: &impl AsStream<M>) -> Result<(), ErrorWith<Self>> {
        let stream = stream.as_stream();
        if let Err(error) = self.check_stream(stream) {
            return Err(ErrorWith::new(error, self));
        }
        let mut events = Vec::with_capacity(self.parts.len());
        for held in &self.parts {
            let here = held.device() == stream.device();
            match if here { held.released_event(stream) } else { Ok(None) } {
                Ok(event) => events.push(event),
                Err(error) => return Err(ErrorWith::new(error, self)),
            }
        }
        // All that can fail has been done.
        self.parts.into_iter().zip(events).for_each(|(held, event)| held.end_at(event));
        Ok(())
    }

    fn on_device_of(&self, stream: BorrowedStream<'_>) -> impl Iterator<Item = &Held> {
        self.parts.iter().filter(move |held| held.device() == stream.device())
    }

    fn check_stream(&self, stream: BorrowedStream<'_>) -> Result<()> {
        let found = self.on_device_of(stream).next();
        found.unwrap_or(&self.parts[0]).check_stream(stream)
    }
}
