//! Memory in address ranges that this process keeps: imports, which are mapped and unmapped while their lease exists.

use std::sync::{Arc, PoisonError};

use super::lease::Lease;
use super::open_target::{OpenTarget, ReservedTarget};
use super::range::{Content, OpenRange, RangeRef, ReservedImport};
use crate::backend::{DeviceIpc, ReceivedHandle, with_device_context};
use crate::model::error::{Error, Remedy, Result};
use crate::model::tensor::LayoutError;
use crate::sharing::import::place::{Place, operations};
use crate::wire::WireHandle;

/// Checks that memory of these handles can be mapped in a reserved range.
fn check_kinds(backend: &dyn DeviceIpc, received: &[ReceivedHandle]) -> Result<()> {
    let name = backend.info().name;
    let what = || "map this memory at addresses that the importer keeps".into();
    let kinds = backend.handle_kinds();
    for handle in received {
        if handle.kind == WireHandle::OWN_ADDRESS {
            let why = Remedy::UseSharedAddress.to_string();
            return Err(Error::Unsupported { backend: name, what: what(), why });
        }
        if let Some(info) = kinds.iter().find(|info| info.kind == handle.kind && !info.remappable) {
            let why = format!(
                "the driver chooses the address of memory of its kind ({}); {}",
                info.name,
                Remedy::AllocateRemappable
            );
            return Err(Error::Unsupported { backend: name, what: what(), why });
        }
    }
    Ok(())
}

impl OpenRange {
    /// Imports the region with this index for a reserved range, without mapping it.
    pub(super) fn import(
        wanted: &OpenTarget<'_>,
        target: ReservedTarget<'_>,
        region: usize,
        received: Vec<ReceivedHandle>,
    ) -> Result<Self> {
        let backend = wanted.backend;
        let operations = operations(&**backend)?;
        check_kinds(&**backend, &received)?;
        let imported = operations.import(received, wanted.device, wanted.access)?;
        let bytes = imported.len;
        let found = match target {
            ReservedTarget::New => Place::alone(backend, wanted.device, bytes),
            ReservedTarget::Places(known) | ReservedTarget::Exchange(known) => match known.get(region) {
                Some(known) if known.range.len == bytes => Ok(Arc::clone(known)),
                other => Err(LayoutError::Differs {
                    what: format!("the mapped size of region {region}"),
                    expected: format!("{} B", other.map_or(0, |known| known.range.len)),
                    found: format!("{bytes} B"),
                }
                .into()),
            },
        };
        let place = match found {
            Ok(place) => place,
            Err(error) => {
                log_failure(operations.release(imported));
                return Err(error);
            }
        };
        wanted.runtime.metrics.driver_opens_total.add(1);
        let content = Content::Imported(ReservedImport { imported, is_mapped: false });
        Ok(Self::new(wanted.runtime, backend, place.range, content, Some(place)))
    }

    /// Maps an import. Returns false if it was closed by force.
    fn map(&self) -> Result<bool> {
        let mut content = self.content.lock().unwrap_or_else(PoisonError::into_inner);
        let Content::Imported(import) = &mut *content else { return Ok(false) };
        operations(&*self.backend)?.map(&import.imported, self.range.ptr)?;
        import.is_mapped = true;
        if let Some(runtime) = self.runtime.here() {
            runtime.metrics.mapped_bytes.add(self.range.len);
            runtime.imports.addresses.add(self.range);
        }
        Ok(true)
    }

    /// Unmaps an import, if it is mapped.
    fn unmap(&self) -> Result<()> {
        let mut content = self.content.lock().unwrap_or_else(PoisonError::into_inner);
        let Content::Imported(import) = &mut *content else { return Ok(()) };
        if !import.is_mapped {
            return Ok(());
        }
        operations(&*self.backend)?.unmap(&import.imported)?;
        import.is_mapped = false;
        self.note_unmapped();
        Ok(())
    }

    /// Releases an import.
    pub(super) fn close_import(&self, import: ReservedImport) -> Result<()> {
        if import.is_mapped {
            self.note_unmapped();
        }
        operations(&*self.backend)?.release(import.imported)
    }

    fn note_unmapped(&self) {
        if let Some(runtime) = self.runtime.here() {
            runtime.metrics.mapped_bytes.subtract(self.range.len);
            runtime.imports.addresses.remove(self.range);
        }
    }
}

impl Lease {
    /// Returns the reserved addresses of its regions; none for other leases.
    pub(in crate::sharing::import) fn places(&self) -> Vec<Arc<Place>> {
        self.regions.ranges().iter().filter_map(|range| range.place.clone()).collect()
    }

    /// Maps all regions in their reserved ranges, or none.
    ///
    /// # Errors
    ///
    /// The vendor's; [`Error::ExporterGone`] if the imports have been closed by force.
    pub(in crate::sharing::import) fn map_reserved(&self) -> Result<()> {
        let map = |range: &RangeRef| match range.map() {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.link.error_gone()),
            Err(error) => Err(error),
        };
        self.for_all(map, |range| range.unmap())
    }

    /// Unmaps all regions, or none.
    ///
    /// # Errors
    ///
    /// The vendor's.
    pub(in crate::sharing::import) fn unmap_reserved(&self) -> Result<()> {
        self.for_all(|range| range.unmap(), |range| range.map().map(drop))
    }

    /// Maps the regions again that [`unmap_reserved`](Self::unmap_reserved) has unmapped. Regions that were closed by force stay
    /// closed.
    pub(in crate::sharing::import) fn map_again(&self) -> Result<()> {
        self.for_all(|range| range.map().map(drop), |range| range.unmap())
    }

    /// Does a step for all regions; undoes it if it fails for one.
    fn for_all(
        &self,
        step: impl Fn(&RangeRef) -> Result<()>,
        undo: impl Fn(&RangeRef) -> Result<()>,
    ) -> Result<()> {
        let ranges = self.regions.ranges();
        if let [range] = ranges {
            return step(range);
        }
        with_device_context(&**self.backend(), self.mapped()[0].device, || {
            for (index, range) in ranges.iter().enumerate() {
                if let Err(error) = step(range) {
                    ranges[..index].iter().for_each(|done| log_failure(undo(done)));
                    return Err(error);
                }
            }
            Ok(())
        })
    }
}

fn log_failure(undone: Result<()>) {
    if let Err(error) = undone {
        tracing::warn!(target: crate::os::log::IMPORT, %error, "a step of a failed open or replacement could not be undone");
    }
}
