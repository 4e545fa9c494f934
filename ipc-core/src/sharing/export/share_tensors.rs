//! Sharing of named tensors.

use std::borrow::Cow;
use std::sync::{Arc, Mutex};

use super::check_backend;
use super::exposure::{Exposure, ExposurePolicy};
use super::gather::Gathered;
use super::guard::{Export, Reach};
use super::isolated::{isolated_copy, stand_in};
use super::owners::Owners;
use super::prepare::{DescribedParts, PartMemory, Prepared, check_read_only};
use super::share::ShareBuilder;
use super::shared::Handles;
use super::tensor_set::{Memories, TensorSet};
use super::{BorrowedMemory, BorrowedPiece};
use crate::backend::interop::{DeviceOwner, Region};
use crate::backend::{Buffer, DeviceIpc};
use crate::model::address::DeviceRange;
use crate::model::device::DeviceOrdinal;
use crate::model::error::{DescriptorError, Error, Result};
use crate::sharing::{Ipc, RecoverableError, Runtime};
use crate::wire::descriptor::{MAX_DESCRIPTOR_BYTES, Memory, PartRegions, encoded_bytes};

impl<'a> ShareBuilder<'a, TensorSet> {
    pub(crate) fn of_tensors(ipc: &'a Ipc, tensors: TensorSet) -> Self {
        Self::unplaced(ipc, tensors, Self::start_tensors)
    }

    fn start_tensors(mut self) -> Result<Export, RecoverableError<TensorSet>> {
        let Some(set) = self.owner.get_mut() else { unreachable!("taken by nothing but this") };
        let mut set = std::mem::replace(set, TensorSet::new(self.ipc.backend()));
        match self.prepare_tensors(&mut set) {
            Ok(prepared) => Ok(prepared.finish(set)),
            Err(error) => Err(RecoverableError::new(error, set)),
        }
    }

    fn prepare_tensors(&self, set: &mut TensorSet) -> Result<PreparedTensors> {
        if self.states_layout() {
            return Err(Error::InvalidRegion(
                "an element type, a shape or an offset was given for all of the tensors; each has a layout of its own".into(),
            ));
        }
        if set.is_empty() {
            return Err(Error::InvalidRegion("a set has at least one tensor; add one first".into()));
        }
        match self.prepare_memories(set, set.memories()) {
            Err(Error::Exposes { .. }) if self.exposing == ExposurePolicy::Copy => {
                let (memories, copies) = self.copies(set)?;
                let mut prepared = self.prepare_memories(set, &memories)?;
                (prepared.copies, prepared.is_remembered) = (Some(copies), false);
                Ok(prepared)
            }
            prepared => prepared,
        }
    }

    fn prepare_memories(&self, set: &TensorSet, given: &Memories) -> Result<PreparedTensors> {
        let runtime = Runtime::get()?;
        let backend = self.ipc.backend();
        let (memories, stand_ins) = self.with_stand_ins(&given.regions)?;
        let is_remembered = stand_ins.is_empty() && !given.any_borrowed();
        let (gathered, handles) = set.gathered(runtime, backend, given, &memories, is_remembered)?;
        let reach = self.reach(given, &gathered, &handles)?;
        let mut parts = DescribedParts::NONE;
        for (index, (part, allocations)) in gathered.parts.iter().zip(&handles).enumerate() {
            let with_name = |region, error| set.with_tensor_of(&gathered, index, region, error);
            if !self.access.is_writable() {
                for (allocation, one) in allocations.iter().enumerate() {
                    check_read_only(backend.info().name, std::slice::from_ref(one))
                        .map_err(|error| with_name(Some(part.region_of(allocation)), error))?;
                }
            }
            let memory = PartMemory {
                device: part.device,
                bytes: part.bytes,
                allocations: Arc::clone(allocations),
                ranges: Arc::clone(&part.ranges),
                described: PartRegions::Many(Arc::clone(&part.described)),
                borrowed: given.borrowed_on(backend, part.device, &gathered, &memories),
            };
            self.add_part(runtime, &mut parts, memory).map_err(|error| with_name(None, error))?;
        }
        // The tensors follow with the last step, which consumes the set and cannot fail.
        let export = self.prepared(runtime, parts, Memory::Tensors(Arc::default()), reach)?;
        let found = encoded_bytes(&export.contents, Some(set.encoded_bytes()));
        if found > MAX_DESCRIPTOR_BYTES {
            return Err(DescriptorError::TooLarge { found }.into());
        }
        Ok(PreparedTensors { export, gathered, handles, stand_ins, is_remembered, copies: None })
    }

    /// Returns the exposure if the policy permits it. It is computed on request, unless the policy needs it.
    fn reach(&self, given: &Memories, gathered: &Gathered, handles: &[Handles]) -> Result<Reach> {
        let bytes = gathered.parts.iter().map(|part| part.bytes).sum();
        if self.exposing == ExposurePolicy::Allow {
            return Ok(Reach::later(bytes, given.owned_whole(), handles));
        }
        let exposure = Exposure::of_tensors(bytes, &given.owned_whole(), handles);
        exposure.check_exact()?;
        Ok(Reach::Known(exposure))
    }

    /// Returns the memories. A byte represents each memory without bytes: of other memory on its device, or of an allocation
    /// that is made for this export.
    fn with_stand_ins<'m>(&self, given: &'m [Region]) -> Result<(Cow<'m, [Region]>, Vec<Buffer>)> {
        let has_bytes = |memory: &&Region| memory.range.len > 0;
        if given.iter().all(|memory| has_bytes(&memory)) {
            return Ok((Cow::Borrowed(given), Vec::new()));
        }
        let mut stand_ins: Vec<Buffer> = Vec::new();
        let mut memories = given.to_vec();
        for memory in memories.iter_mut().filter(|memory| memory.range.len == 0) {
            check_backend("the memory", memory.backend, self.ipc.backend().info().name)?;
            let device = memory.range.device;
            let others = given.iter().filter(has_bytes).copied();
            let other =
                others.chain(stand_ins.iter().map(DeviceOwner::region)).find(|o| o.range.device == device);
            let whole = match other {
                Some(other) => other,
                None => {
                    let made = stand_in(self.ipc, device, self.access, false)?;
                    stand_ins.push(made);
                    stand_ins[stand_ins.len() - 1].region()
                }
            };
            *memory = Region { range: DeviceRange { len: 1, ..whole.range }, ..whole };
        }
        Ok((Cow::Owned(memories), stand_ins))
    }

    /// Returns isolated copies of all memories.
    fn copies(&self, set: &TensorSet) -> Result<(Memories, Vec<Buffer>)> {
        let mut copies = Vec::new();
        let mut regions = Vec::with_capacity(set.memories().regions.len());
        for region in &set.memories().regions {
            if region.range.len == 0 {
                regions.push(*region);
                continue;
            }
            let copy = isolated_copy(self.ipc, *region, self.ready_stream(region.range.device))?;
            regions.push(Region { range: copy.range(), allocation: Some(copy.range()), ..*region });
            copies.push(copy);
        }
        Ok((Memories::owned(regions), copies))
    }
}

impl Memories {
    /// Returns the borrowed memories on a device in their current state.
    fn borrowed_on(
        &self,
        backend: &Arc<dyn DeviceIpc>,
        device: DeviceOrdinal,
        gathered: &Gathered,
        memories: &[Region],
    ) -> Option<BorrowedMemory> {
        if !self.any_borrowed() {
            return None;
        }
        let on_device = (0..memories.len())
            .filter(|index| self.is_borrowed(*index) && memories[*index].range.device == device);
        let pieces: Vec<_> = on_device
            .map(|index| {
                let Region { range, allocation, .. } = memories[index];
                BorrowedPiece { range, allocation, extents: gathered.extents_of(index, range) }
            })
            .collect();
        (!pieces.is_empty()).then(|| BorrowedMemory::new(backend, pieces))
    }
}

/// An export of named tensors before it is published: nothing can fail after this.
struct PreparedTensors {
    export: Prepared,
    gathered: Arc<Gathered>,
    /// The handles of each part.
    handles: Vec<Handles>,
    /// Memory that only this export uses.
    stand_ins: Vec<Buffer>,
    is_remembered: bool,
    /// The copies that are shared instead of the memories, which are dropped.
    copies: Option<Vec<Buffer>>,
}

impl PreparedTensors {
    fn finish(mut self, mut set: TensorSet) -> Export {
        let mut owners = set.take_owners();
        if let Some(copies) = self.copies {
            owners = Owners::new(set.backend());
            copies.into_iter().for_each(|copy| owners.add(&copy.region(), copy));
        }
        self.stand_ins.into_iter().for_each(|stand_in| owners.add(&stand_in.region(), stand_in));
        let remembered = self.is_remembered.then_some(&self.handles[..]);
        self.export.contents.memory = Memory::Tensors(set.into_tensors(self.gathered, remembered));
        self.export.publish(|device| Box::new(Mutex::new(owners.take(device))))
    }
}
