//! A copy over the network into memory that exists already.

use std::collections::BTreeMap;

use super::builder::OpenBuilder;
use super::open::OpenOptions;
use super::open_export::LazyDeadline;
use crate::backend::engine::Piece;
use crate::model::address::DeviceRange;
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::model::layout::{LayoutError, TensorLayout};
use crate::model::tensor::NamedTensor;
use crate::sharing::RecoverableError;
use crate::sharing::export::{TensorSet, check_backend};
use crate::sharing::remote::pull_into;
use crate::wire::descriptor::{DescribedRegion, Memory};

/// The copies of one transfer: from one export of the descriptor to one device.
#[derive(Debug, Default)]
struct TransferPlan {
    destinations: Vec<DeviceRange>,
    pieces: Vec<Piece>,
}

/// The transfers by the part of the descriptor and the device.
type TransferPlans = BTreeMap<(usize, DeviceOrdinal), TransferPlan>;

impl OpenBuilder<'_> {
    /// Copies the memory over the network to memory that exists already, and waits on the host until the copy is complete. See
    /// [`CopyPolicy`](crate::CopyPolicy) for what both sides need.
    ///
    /// The set names the tensors to copy: those of the export with these names, or the only one where the export has no names.
    /// Other tensors of the export are not copied. Each has the element type and the shape of the exporter's, and its elements are
    /// contiguous in both processes, or in the same order without gaps. After success the set has the bytes, and can be used again.
    ///
    /// Work that was submitted on the destinations' devices is waited for. No other code may access the destinations until the
    /// call returns; they belong to the set, so that they stay allocated until the transfer engine has finished with them. To
    /// keep access to a destination, put it into an [`Arc`](std::sync::Arc), of which the set has a clone.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`]; [`Error::Layout`] in an [`Error::InBundle`] for another element type or shape, or elements with
    /// gaps; [`Error::InvalidRegion`] for destinations that overlap; otherwise as for [`copy`](Self::copy). All are in
    /// an [`RecoverableError`], which contains the set, or `None` if the engine has not finished: the library then keeps the
    /// memory until it has. After an error of the copy, the contents are unspecified.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use device_ipc_core::{Descriptor, Dtype, Ipc, TensorLayout};
    /// # fn pull(ipc: &Ipc, descriptor: &Descriptor) -> device_ipc_core::Result<()> {
    /// let mut weights = ipc.tensors();
    /// weights.owned("w", ipc.allocate(0, 80)?, Some(TensorLayout::contiguous(Dtype::F32, [4, 5])?))?;
    /// for _ in 0..10 {
    ///     weights = ipc.open(descriptor).pull_into(weights)?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn pull_into(self, destination: TensorSet) -> Result<TensorSet, RecoverableError<Option<TensorSet>>> {
        self.options.pull_into(destination)
    }
}

impl OpenOptions<'_> {
    fn pull_into(&self, destination: TensorSet) -> Result<TensorSet, RecoverableError<Option<TensorSet>>> {
        let transfers = match self.check_destination(&destination) {
            Ok(transfers) => transfers,
            Err(error) => return Err(RecoverableError::new(error, Some(destination))),
        };
        let all_pieces = transfers.values().flat_map(|transfer| &transfer.pieces);
        let total = all_pieces.map(|piece| piece.len).fold(0, u64::saturating_add);
        let (mut set, mut copied) = (destination, 0);
        for ((part, device), transfer) in &transfers {
            let begun = copied;
            copied += transfer.pieces.iter().map(|piece| piece.len).sum::<u64>();
            set = self.pull_one((*part, *device), transfer, set, &|arrived| {
                self.progress.call(begun + arrived, total);
            })?;
        }
        Ok(set)
    }

    fn pull_one(
        &self,
        (part, device): (usize, DeviceOrdinal),
        transfer: &TransferPlan,
        set: TensorSet,
        report: &dyn Fn(u64),
    ) -> Result<TensorSet, RecoverableError<Option<TensorSet>>> {
        let time_limit = LazyDeadline::new(self.timeout);
        let opening = match self.opening(part, |_, _| Ok(device), None, &time_limit) {
            Ok(opening) => opening,
            Err(error) => return Err(RecoverableError::new(error, Some(set))),
        };
        let prepared = opening.incoming("a copy from another host", report).and_then(|incoming| {
            if let Some(delivery) = self.delivery {
                delivery.wait_ready(None, time_limit.deadline())?;
            }
            self.ipc.backend().synchronize_device(device)?;
            Ok(incoming)
        });
        match prepared {
            Ok(incoming) => pull_into(&incoming, &transfer.destinations, &transfer.pieces, set),
            Err(error) => Err(RecoverableError::new(error, Some(set))),
        }
    }

    /// Compares the tensors of the set with those of the export. Returns the copies.
    fn check_destination(&self, set: &TensorSet) -> Result<TransferPlans> {
        self.check_kind()?;
        let contents = self.descriptor.contents();
        let backend = self.ipc.backend().info().name;
        check_backend("the descriptor", contents.backend.as_str(), backend)?;
        check_backend("the destination", set.backend().info().name, backend)?;
        if set.is_empty() {
            return Err(Error::InvalidRegion("the destination has no tensors; add at least one".into()));
        }
        let mut transfers = TransferPlans::new();
        for (tensor, range) in set.tensors() {
            let name = tensor.name;
            let (part, piece) = self.source_of(&tensor, set.len()).map_err(|error| error.of_tensor(name))?;
            // A tensor without elements has no bytes.
            let start = tensor.offset + tensor.layout.start_bytes();
            let Some(destination) = range.slice(start, piece.len).filter(|range| range.len > 0) else {
                continue;
            };
            let transfer = transfers.entry((part, destination.device)).or_default();
            transfer.pieces.push(Piece { destination: transfer.destinations.len(), ..piece });
            transfer.destinations.push(destination);
        }
        let destinations = transfers.values().flat_map(|transfer| &transfer.destinations);
        check_disjoint(destinations.copied().collect())?;
        Ok(transfers)
    }

    /// Returns the bytes to copy to a tensor of the set: their part of the descriptor, and their place.
    fn source_of(&self, destination: &NamedTensor<'_>, tensors: usize) -> Result<(usize, Piece)> {
        let contents = self.descriptor.contents();
        let position = match &contents.memory {
            Memory::Tensors(all) => all.table().find(destination.name)?,
            Memory::Region(_) if tensors > 1 => {
                return Err(Error::InvalidRegion(format!(
                    "the export is one region without names, and the destination has {tensors} tensors; pass one"
                )));
            }
            Memory::Region(DescribedRegion { len, layout: None, .. }) => {
                let bytes = contiguous_bytes(destination.layout)?;
                if bytes != *len {
                    return Err(Error::InvalidRegion(format!(
                        "the export has {len} B, and the destination {bytes} B; pass memory of the same size"
                    )));
                }
                return Ok((0, Piece { source: 0, source_offset: 0, ..piece_of(bytes) }));
            }
            Memory::Region(_) => 0,
        };
        let source = contents.tensor(position);
        let bytes = check_same_elements(source.layout, destination.layout)?;
        let (part, region) = contents.place(position);
        // The region of an unnamed tensor is what the exporter has registered; that of a named one is the whole allocation.
        let offset = if source.name.is_empty() { 0 } else { source.offset };
        let source_offset = offset.saturating_add(source.layout.start_bytes());
        Ok((part, Piece { source: region, source_offset, ..piece_of(bytes) }))
    }
}

const fn piece_of(len: u64) -> Piece {
    Piece { source: 0, source_offset: 0, destination: 0, destination_offset: 0, len }
}

/// Checks that two tensors have the same elements in the same order without gaps. Returns their size in bytes.
fn check_same_elements(source: &TensorLayout, destination: &TensorLayout) -> Result<u64, LayoutError> {
    if source.dtype() != destination.dtype() || source.shape() != destination.shape() {
        let text = |layout: &TensorLayout| format!("{} {:?}", layout.dtype(), layout.shape());
        return Err(LayoutError::OtherTensor { exporter: text(source), destination: text(destination) });
    }
    let bytes = source.span_bytes() - source.start_bytes();
    if source.strides() == destination.strides() && source.is_dense() {
        return Ok(if source.is_empty() { 0 } else { bytes });
    }
    contiguous_bytes(source)?;
    contiguous_bytes(destination)
}

/// Returns the size of the elements of a contiguous tensor in bytes.
fn contiguous_bytes(layout: &TensorLayout) -> Result<u64, LayoutError> {
    if !layout.is_contiguous() {
        let (shape, strides) = (layout.shape().to_vec(), layout.strides().to_vec());
        return Err(LayoutError::NotContiguous { shape, strides });
    }
    Ok(if layout.is_empty() { 0 } else { layout.span_bytes() - layout.start_bytes() })
}

/// Checks that no two ranges have bytes in common.
fn check_disjoint(mut ranges: Vec<DeviceRange>) -> Result<()> {
    ranges.sort_unstable_by_key(|range| (range.device, range.ptr));
    for two in ranges.windows(2) {
        let (one, next) = (two[0], two[1]);
        if one.device == next.device && next.ptr.get() - one.ptr.get() < one.len {
            return Err(Error::InvalidRegion(format!(
                "two destinations of {} B and {} B overlap at {} on device {}; pass memory of its own for each tensor",
                one.len, next.len, next.ptr, next.device
            )));
        }
    }
    Ok(())
}
