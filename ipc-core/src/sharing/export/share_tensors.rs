//! Sharing of named tensors.

use std::borrow::Cow;
use std::sync::{Arc, Mutex};

use super::check_backend;
use super::exposure::{Exposure, ExposurePolicy};
use super::gather::{Gathered, GatheredPart};
use super::guard::{Export, Published, Reach};
use super::share::{ShareBuilder, check_read_only, isolated_copy, ready_event, stand_in};
use super::shared::{Handles, Shared};
use super::table::NewExport;
use super::tensor_set::{Memories, Remembered, TensorSet};
use super::{BorrowedMemory, BorrowedPiece};
use crate::backend::Buffer;
use crate::backend::interop::{DeviceOwner, Region};
use crate::model::address::DeviceRange;
use crate::model::error::{DescriptorError, Error, Result};
use crate::model::one_or_many::OneOrMany;
use crate::os::kill::kill_point;
use crate::sharing::{ErrorWith, Runtime, Session};
use crate::wire::descriptor::{
    BackendName, Contents, Descriptor, ExportId, MAX_DESCRIPTOR_BYTES, Memory, Part, PartRegions, Tensors,
    encoded_bytes,
};

impl<'a> ShareBuilder<'a, TensorSet> {
    pub(crate) fn of_tensors(session: &'a Session, tensors: TensorSet) -> Self {
        Self::unplaced(session, tensors, Self::start_tensors)
    }

    fn start_tensors(mut self) -> Result<Export, ErrorWith<TensorSet>> {
        let Some(set) = self.owner.get_mut() else { unreachable!("taken by nothing but this") };
        let mut set = std::mem::replace(set, TensorSet::new(self.session.backend()));
        match self.prepare_tensors(&mut set) {
            Ok(prepared) => Ok(prepared.finish(set)),
            Err(error) => Err(ErrorWith::new(error, set)),
        }
    }

    fn prepare_tensors(&self, set: &mut TensorSet) -> Result<Prepared> {
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

    fn prepare_memories(&self, set: &TensorSet, given: &Memories) -> Result<Prepared> {
        let runtime = Runtime::get()?;
        let (session, backend) = (self.session, self.session.backend());
        let (memories, stand_ins) = self.with_stand_ins(&given.regions)?;
        let is_remembered = stand_ins.is_empty() && !given.any_borrowed();
        let (gathered, handles) = set.gathered(runtime, backend, given, &memories, is_remembered)?;
        let reach = self.reach(given, &gathered, &handles)?;
        let mut exports = Vec::with_capacity(gathered.parts.len());
        let mut parts = OneOrMany::NONE;
        for (index, (part, allocations)) in gathered.parts.iter().zip(&handles).enumerate() {
            let blame = |region, error| set.blame_part(&gathered, (index, region), error);
            let mut export = self.prepare_part(runtime, part, Arc::clone(allocations), blame)?;
            export.borrowed = given.borrowed_on(backend, part.device, &gathered, &memories)?;
            parts.push(Part {
                home: session.identity_of(part.device)?,
                // The table assigns the number; the placeholders of the parts differ.
                export: ExportId(index as u64),
                token: export.token,
                ready: export.shared.ready.is_some(),
                regions: PartRegions::Many(Arc::clone(&part.described)),
            });
            exports.push(export);
        }
        let contents = Contents {
            backend: BackendName::new(backend.info().name)?,
            exporter: runtime.identity,
            broker: runtime.poller.listen(session.socket_directory())?,
            access: self.access,
            parts,
            // Replaced after the last step that can fail.
            memory: Memory::Tensors(Arc::default()),
            ring: None,
            network: session.network_addresses(),
        };
        let found = encoded_bytes(&contents, Some(set.encoded_bytes()));
        if found > MAX_DESCRIPTOR_BYTES {
            return Err(DescriptorError::TooLarge { found }.into());
        }
        Ok(Prepared {
            runtime,
            contents,
            exports,
            gathered,
            handles,
            stand_ins,
            reach,
            is_remembered,
            copies: None,
        })
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
            check_backend("the memory", memory.backend, self.session.backend().info().name)?;
            let device = memory.range.device;
            let others = given.iter().filter(has_bytes).copied();
            let other =
                others.chain(stand_ins.iter().map(DeviceOwner::region)).find(|o| o.range.device == device);
            let whole = match other {
                Some(other) => other,
                None => {
                    let made = stand_in(self.session, device, self.access, false)?;
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
            let copy = isolated_copy(self.session, *region, self.ready_stream(region.range.device))?;
            regions.push(Region { range: copy.range(), allocation: Some(copy.range()), ..*region });
            copies.push(copy);
        }
        Ok((Memories::owned(regions), copies))
    }

    /// `blame` adds the name of the tensor concerned to an error, by region or for the whole part.
    fn prepare_part(
        &self,
        runtime: &Runtime,
        part: &GatheredPart,
        allocations: Handles,
        blame: impl Fn(Option<usize>, Error) -> Error,
    ) -> Result<NewExport> {
        let backend = self.session.backend();
        if !self.access.is_writable() {
            let each = allocations.iter().enumerate();
            let mut checked = each
                .map(|(index, one)| (index, check_read_only(backend.info().name, std::slice::from_ref(one))));
            let refused = checked.find_map(|(index, checked)| Some((index, checked.err()?)));
            if let Some((allocation, error)) = refused {
                return Err(blame(Some(part.region_of(allocation)), error));
            }
        }
        kill_point!("exporter:exported");
        let ready = self.ready_stream(part.device).map(|stream| ready_event(self.session, stream));
        Ok(NewExport {
            borrowed: None,
            backend: backend.info().name,
            bytes: part.bytes,
            access: self.access,
            allow: self.session.allow_list().clone(),
            ahead: self.ahead,
            token: runtime.exports.new_token()?,
            shared: Shared {
                ready: ready.transpose().map_err(|error| blame(None, error))?.flatten(),
                allocations,
                regions: Arc::clone(&part.ranges),
                remote: self.session.remote_memory(),
                owner: None,
                keeps: false,
            },
        })
    }
}

impl Memories {
    /// Returns the borrowed memories on a device in their current state.
    fn borrowed_on(
        &self,
        backend: &Arc<dyn crate::backend::DeviceIpc>,
        device: crate::model::device::DeviceOrdinal,
        gathered: &Gathered,
        memories: &[Region],
    ) -> Result<Option<BorrowedMemory>> {
        if !self.any_borrowed() {
            return Ok(None);
        }
        let on_device = (0..memories.len())
            .filter(|index| self.is_borrowed(*index) && memories[*index].range.device == device);
        let pieces: Vec<_> = on_device
            .map(|index| {
                let Region { range, allocation, .. } = memories[index];
                BorrowedPiece { range, allocation, extents: gathered.extents_of(index, range) }
            })
            .collect();
        Ok((!pieces.is_empty()).then(|| BorrowedMemory::new(backend, pieces)))
    }
}

/// A prepared export: nothing can fail after this.
struct Prepared {
    runtime: &'static Runtime,
    contents: Contents,
    exports: Vec<NewExport>,
    gathered: Arc<Gathered>,
    handles: Vec<Handles>,
    /// Memory that only this export uses.
    stand_ins: Vec<Buffer>,
    reach: Reach,
    is_remembered: bool,
    /// The copies that are shared instead of the memories, which are dropped.
    copies: Option<Vec<Buffer>>,
}

impl Prepared {
    fn finish(mut self, mut set: TensorSet) -> Export {
        let backend = Arc::clone(set.backend());
        let mut owners = set.take_owners();
        if let Some(copies) = self.copies {
            owners = super::owners::Owners::new(&backend);
            copies.into_iter().for_each(|copy| owners.add(&copy.region(), copy));
        }
        for stand_in in self.stand_ins {
            let region = stand_in.region();
            owners.add(&region, stand_in);
        }
        let mut published = OneOrMany::NONE;
        let places = self.exports.into_iter().zip(&self.gathered.parts);
        for ((mut export, place), part) in places.zip(self.contents.parts.iter_mut()) {
            export.shared.owner = Some(Box::new(Mutex::new(owners.take(place.device))));
            part.export = self.runtime.exports.insert(export);
            published.push(Published::new(part.export, self.runtime));
            kill_point!("exporter:published");
        }
        let remembered = self.is_remembered.then_some(Remembered { allocations: &self.handles });
        let tensors: Arc<Tensors> = set.into_tensors(self.gathered, remembered);
        tracing::debug!(target: crate::os::log::EXPORT, parts = published.len(), tensors = tensors.table().len(), "named tensors are shared");
        self.contents.memory = Memory::Tensors(tensors);
        Export::new(Descriptor::new(self.contents), published, self.reach)
    }
}
