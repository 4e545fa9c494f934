//! Sharing of one region.

use std::sync::Mutex;

use super::exposure::{Exposure, ExposurePolicy};
use super::gather::{check_region, gather_one, no_bytes, offset_in};
use super::guard::{Export, Reach};
use super::isolated::{isolated_copy, stand_in};
use super::prepare::{DescribedParts, PartMemory, Prepared, check_read_only};
use super::share::ShareBuilder;
use super::{BorrowedMemory, BorrowedPiece};
use crate::backend::interop::{DeviceOwner as _, Region};
use crate::backend::{Buffer, check_backend};
use crate::model::error::{Error, Result};
use crate::model::tensor::{LayoutError, TensorLayout, check_alignment};
use crate::sharing::{RecoverableError, Runtime};
use crate::wire::descriptor::{DescribedExtent, DescribedRegion, MAX_EXTENTS, Memory, PartRegions};

impl<O: Send + 'static> ShareBuilder<'_, O> {
    pub(super) fn start_region(self) -> Result<Export, RecoverableError<O>> {
        if self.region.range.len == 0 {
            return self.start_without_bytes();
        }
        match self.prepare_region(self.region) {
            Ok(prepared) => Ok(prepared.publish_one(Mutex::new(self.owner))),
            Err(Error::Exposes { .. }) if self.exposing == ExposurePolicy::Copy => {
                match self.prepare_copy() {
                    Ok((prepared, copy)) => {
                        // The copy replaces the original.
                        drop(self.owner);
                        Ok(prepared.publish_one(copy))
                    }
                    Err(error) => Err(self.refuse(error)),
                }
            }
            Err(error) => Err(self.refuse(error)),
        }
    }

    fn start_without_bytes(mut self) -> Result<Export, RecoverableError<O>> {
        // The shared byte belongs to the library.
        self.borrowed = false;
        match self.prepare_without_bytes() {
            Ok((prepared, stand_in)) => Ok(prepared.publish_one((Mutex::new(self.owner), stand_in))),
            Err(error) => Err(self.refuse(error)),
        }
    }

    fn prepare_without_bytes(&self) -> Result<(Prepared, Buffer)> {
        check_backend("the memory", self.region.backend, self.ipc.backend().info().name)?;
        if self.layout()?.is_none() {
            return Err(no_bytes());
        }
        let alone = self.exposing != ExposurePolicy::Allow;
        let stand_in = stand_in(self.ipc, self.region.range.device, self.access, alone)?;
        Ok((self.prepare_region(stand_in.region())?, stand_in))
    }

    /// Prepares the export of an isolated copy.
    fn prepare_copy(&self) -> Result<(Prepared, Buffer)> {
        let copy = isolated_copy(self.ipc, self.region, self.ready_stream(self.region.range.device))?;
        let region = Region { range: copy.range(), allocation: Some(copy.range()), ..self.region };
        Ok((self.prepare_region(region)?, copy))
    }

    fn prepare_region(&self, region: Region) -> Result<Prepared> {
        let runtime = Runtime::get()?;
        let backend = self.ipc.backend();
        let name = backend.info().name;
        let range = region.range;
        check_region(name, &region)?;
        let layout = self.layout()?;
        let (extents, allocations) = gather_one(runtime, backend, &region, self.borrowed)?;
        let offset = offset_in(range, &extents)?;
        if !self.access.is_writable() {
            check_read_only(name, &allocations)?;
        }
        let exposure = Exposure::of(&region, &allocations);
        if self.exposing != ExposurePolicy::Allow {
            exposure.check_exact()?;
        }
        if extents.len() > MAX_EXTENTS {
            return Err(Error::InvalidRegion(format!(
                "it lies in {} allocations, at most {MAX_EXTENTS}",
                extents.len()
            )));
        }
        let described = PartRegions::One(extents.iter().map(DescribedExtent::of).collect());
        let borrowed = self.borrowed.then(|| {
            let piece = BorrowedPiece { range, allocation: region.allocation, extents };
            BorrowedMemory::new(backend, [piece])
        });
        let memory = PartMemory {
            device: range.device,
            bytes: range.len,
            allocations,
            ranges: [range].into(),
            described,
            borrowed,
        };
        let mut parts = DescribedParts::NONE;
        self.add_part(runtime, &mut parts, memory)?;
        let memory = Memory::Region(DescribedRegion { offset, len: range.len, layout });
        self.prepared(runtime, parts, memory, Reach::Known(exposure))
    }

    fn layout(&self) -> Result<Option<TensorLayout>> {
        let layout = match (self.dtype, &self.shape, &self.strides) {
            (Some(dtype), Some(shape), Some(strides)) => {
                TensorLayout::strided(dtype, shape.as_slice(), strides.as_slice())?
            }
            (Some(dtype), Some(shape), None) => TensorLayout::contiguous(dtype, shape.as_slice())?,
            (Some(dtype), None, None) => TensorLayout::to_end(dtype, self.offset, self.region.range.len)?,
            (_, None, Some(strides)) => {
                return Err(LayoutError::Strides { dimensions: 0, strides: strides.len() }.into());
            }
            (None, Some(_), _) => return Err(LayoutError::NoDtype.into()),
            (None, None, None) if self.offset != 0 => return Err(LayoutError::NoDtype.into()),
            (None, None, None) => return Ok(None),
        };
        let layout = layout.with_element_offset(self.offset)?;
        layout.check_fits(self.region.range.len)?;
        if self.region.range.len > 0 {
            check_alignment(layout.dtype(), self.region.range.ptr.get())?;
        }
        Ok(Some(layout))
    }
}
