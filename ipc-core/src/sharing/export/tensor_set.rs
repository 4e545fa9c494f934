//! Sets of named tensors to be shared, and the remembered last ones.
//!
//! A program that hands over weights or a KV cache shares the same tensors again and again, with new contents. The second time,
//! names and layouts have been checked and encoded already, and the allocations have handles. So [`List`] compares each tensor with
//! the one at its position in a remembered set, and builds a table of its own from the first difference on. The places and handles
//! are used again if the memories are the same and exports still keep their allocations, so that no other memory has come to the
//! same addresses meanwhile. Otherwise the driver is asked.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use super::gather::{Gathered, gather};
use super::owners::Owners;
use super::shared::{Allocation, Handles};
use crate::backend::interop::{DeviceOwner, Region};
use crate::backend::{DeviceBound, DeviceIpc};
use crate::model::address::{DevicePtr, DeviceRange};
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::model::layout::{Dtype, LayoutError, TensorLayout, check_alignment};
use crate::model::tensor::{MAX_TENSORS, NamedTensor, TensorTable, check_name};
use crate::os::Recent;
use crate::sharing::{RecoverableError, Runtime};
use crate::wire::descriptor::{MOST_REMEMBERED_BYTES, Tensors, encoded_tensor_bytes};

/// Named tensors in any number of allocations on any of the devices; shared by [`Ipc::share_all`](crate::Ipc::share_all).
///
/// # Examples
///
/// ```
/// # fn main() -> device_ipc_core::Result<()> {
/// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1").expect("a valid specification");
/// # let ipc = device_ipc_core::Ipc::with_backend(backend);
/// use device_ipc_core::{Dtype, TensorLayout};
/// let mut set = ipc.tensors();
/// let layout = TensorLayout::contiguous(Dtype::F32, [16])?;
/// set.owned("bias", ipc.allocate(0, 64)?, Some(layout.clone()))?;
/// let packed = set.memory(ipc.allocate(0, 128)?); // two tensors in one allocation
/// set.tensor("query", packed, 0, layout.clone())?;
/// set.tensor("key", packed, 64, layout)?;
/// let export = ipc.share_all(set).start()?;
/// assert_eq!(export.descriptor().tensors().len(), 3);
/// # Ok(())
/// # }
/// ```
pub struct TensorSet {
    /// Distinguishes the memories of this set from those of others.
    number: u64,
    memories: Memories,
    owners: Owners,
    list: List,
}

/// Memory that was added to a [`TensorSet`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemoryId {
    set: u64,
    index: usize,
}

/// The memories of the tensors.
#[derive(Debug, Default)]
pub(super) struct Memories {
    pub(super) regions: Vec<Region>,
    /// The indices of borrowed memories, in ascending order.
    borrowed: Vec<usize>,
}

impl Memories {
    pub(super) const fn owned(regions: Vec<Region>) -> Self {
        Self { regions, borrowed: Vec::new() }
    }

    pub(super) fn any_borrowed(&self) -> bool {
        !self.borrowed.is_empty()
    }

    pub(super) fn is_borrowed(&self, index: usize) -> bool {
        self.borrowed.binary_search(&index).is_ok()
    }

    /// Returns the allocations that their owners passed as a whole: the vendor's padding belongs to no other memory.
    pub(super) fn owned_whole(&self) -> Vec<DeviceRange> {
        let whole = |region: &&Region| region.allocation == Some(region.range);
        self.regions.iter().filter(whole).map(|region| region.range).collect()
    }
}

/// The tensors that were added so far, with the memory of each.
enum List {
    /// The tensors added so far are the first ones of an earlier set.
    AsBefore(Arc<RememberedSet>, usize),
    /// The offsets count from the start of each memory.
    Anew(TensorTable, Vec<u32>),
}

/// The remembered data of a shared set. It keeps no memory allocated.
#[derive(Debug)]
struct RememberedSet {
    memories: Vec<Region>,
    gathered: Arc<Gathered>,
    /// The allocations of each part, as long as an export has them.
    allocations: Vec<Weak<[Arc<Allocation>]>>,
    tensors: Arc<Tensors>,
    /// The memory of each tensor.
    memory_of: Vec<u32>,
}

/// The last shared sets. A caller that shares the same tensors with new contents has their descriptions already.
static REMEMBERED: Recent<RememberedSet> = Recent::new();

impl RememberedSet {
    /// Remembers a set, in place of one with the same tensors.
    fn remember(self) {
        if self.tensors.bytes().len() <= MOST_REMEMBERED_BYTES {
            let tensors = Arc::clone(&self.tensors);
            REMEMBERED.remember(Arc::new(self), |known| Arc::ptr_eq(&known.tensors, &tensors));
        }
    }

    /// Returns the places and the handles of these memories from a set of the same memories, if exports keep all of its
    /// allocations: allocated memory at these addresses is then in them.
    fn of_the_same(
        backend: &Arc<dyn DeviceIpc>,
        memories: &[Region],
    ) -> Option<(Arc<Gathered>, Vec<Handles>)> {
        let known = REMEMBERED.find(|known| known.memories == memories)?;
        let allocations: Option<Vec<_>> = known.allocations.iter().map(Weak::upgrade).collect();
        let allocations = allocations?;
        let is_kept = |allocation: &Arc<Allocation>| allocation.is_kept() && allocation.is_of(backend);
        let kept = allocations.iter().flat_map(|part| part.iter()).all(is_kept);
        kept.then(|| (Arc::clone(&known.gathered), allocations))
    }

    /// Returns whether the tensor at this position is this one.
    fn has(&self, position: usize, memory: usize, tensor: NamedTensor<'_>) -> bool {
        if self.memory_of.get(position) != Some(&(memory as u32)) {
            return false;
        }
        let known = self.tensors.table().at(position);
        known.name == tensor.name
            && Some(known.offset) == self.gathered.places[memory].offset.checked_add(tensor.offset)
            && known.layout == tensor.layout
    }

    /// Returns a memory if it is that of the tensor at this position, and contains exactly this tensor.
    fn memory_with(
        &self,
        position: usize,
        memory: usize,
        backend: &str,
        tensor: &RawTensor<'_>,
    ) -> Option<Region> {
        if self.memory_of.get(position) != Some(&(memory as u32)) {
            return None;
        }
        let (known, region) = (self.tensors.table().at(position), self.memories.get(memory)?);
        let RawTensor { name, device, ptr, dtype, shape, strides } = *tensor;
        let is_same = (region.range.device, region.range.ptr) == (device, ptr)
            && (region.dtype, region.allocation, region.backend) == (Some(dtype), None, backend)
            && known.name == name
            && known.offset == self.gathered.places[memory].offset
            && (known.layout.dtype(), known.layout.element_offset()) == (dtype, 0)
            && (known.layout.shape(), known.layout.strides()) == (shape, strides)
            && region.range.len == known.layout.span_bytes();
        is_same.then_some(*region)
    }
}

/// A tensor that is alone in its memory.
struct RawTensor<'a> {
    name: &'a str,
    device: DeviceOrdinal,
    ptr: DevicePtr,
    dtype: Dtype,
    shape: &'a [u64],
    strides: &'a [u64],
}

impl List {
    /// Adds a tensor that is the one of the earlier set at its position, also its memory, which is returned: it was checked then. Adds no
    /// other one.
    fn add_as_before(&mut self, memory: usize, backend: &str, tensor: &RawTensor<'_>) -> Option<Region> {
        let Self::AsBefore(before, count) = self else { return None };
        let region = before.memory_with(*count, memory, backend, tensor)?;
        *count += 1;
        Some(region)
    }

    /// Adds a tensor, unless its name is used already.
    fn add(&mut self, memory: usize, tensor: NamedTensor<'_>) -> Result<()> {
        if self.len() == 0 {
            let before = REMEMBERED.find(|known| known.has(0, memory, tensor));
            *self = before.map_or_else(Self::default, |before| Self::AsBefore(before, 0));
        }
        if let Self::AsBefore(before, count) = self
            && before.has(*count, memory, tensor)
        {
            *count += 1;
            return Ok(());
        }
        let (table, memory_of) = self.anew();
        table.push(tensor.name, tensor.offset, tensor.layout.clone())?;
        memory_of.push(memory as u32);
        Ok(())
    }

    /// Returns the list for changes; it is no longer that of an earlier set.
    fn anew(&mut self) -> (&mut TensorTable, &mut Vec<u32>) {
        if let Self::AsBefore(before, count) = self {
            let in_memory = |position, offset| {
                offset - before.gathered.places[before.memory_of[position] as usize].offset
            };
            let table = before.tensors.table().first(*count, in_memory);
            let memory_of = before.memory_of[..*count].to_vec();
            *self = Self::Anew(table, memory_of);
        }
        match self {
            Self::Anew(table, memory_of) => (table, memory_of),
            Self::AsBefore(..) => unreachable!("it was replaced"),
        }
    }

    /// Returns the tensors with their places in the regions, and the memory of each.
    fn placed(&mut self, gathered: &Gathered) -> (Arc<Tensors>, Vec<u32>) {
        let (table, memory_of) = self.anew();
        let (mut table, memory_of) = (std::mem::take(table), std::mem::take(memory_of));
        // Each tensor fits its memory, which fits its region.
        table.move_each(|position| gathered.places[memory_of[position] as usize].offset);
        let of_memories = gathered.regions();
        let regions = memory_of.iter().map(|memory| of_memories[*memory as usize]).collect();
        (Arc::new(Tensors::new(table, regions)), memory_of)
    }

    fn len(&self) -> usize {
        match self {
            Self::AsBefore(_, count) => *count,
            Self::Anew(table, _) => table.len(),
        }
    }

    fn memory_of(&self) -> &[u32] {
        match self {
            Self::AsBefore(before, count) => &before.memory_of[..*count],
            Self::Anew(_, memory_of) => memory_of,
        }
    }

    fn table(&self) -> &TensorTable {
        match self {
            Self::AsBefore(before, _) => before.tensors.table(),
            Self::Anew(table, _) => table,
        }
    }
}

impl Default for List {
    fn default() -> Self {
        Self::Anew(TensorTable::default(), Vec::new())
    }
}

impl TensorSet {
    pub(crate) fn new(backend: &Arc<dyn DeviceIpc>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            memories: Memories::default(),
            owners: Owners::new(backend),
            list: List::default(),
        }
    }

    /// Adds memory for tensors. The owner is dropped after the last importer has released the export.
    ///
    /// Memories may be on several devices, overlap, or share allocations: importers open each allocation once.
    pub fn memory<M, O: DeviceOwner<M>>(&mut self, owner: O) -> MemoryId {
        let region = owner.region();
        self.add_memory(region, owner)
    }

    /// Adds a tensor in further memory of an owner that this set has: one owner may keep the memory of any number of tensors. The memory
    /// is that from the tensor's first element, at this address of this device, to the end of its last. The strides are in elements.
    ///
    /// # Errors
    ///
    /// As for [`tensor`](Self::tensor), and [`Error::Layout`] as for [`TensorLayout::strided`].
    ///
    /// # Safety
    ///
    /// The owner of other memory of this set, on the same device, keeps this memory allocated as a [`DeviceOwner`] keeps its own.
    #[allow(unsafe_code, reason = "takes memory on trust that another value of the set owns")]
    pub unsafe fn further_tensor(
        &mut self,
        name: impl AsRef<str>,
        place: (DeviceOrdinal, DevicePtr),
        dtype: Dtype,
        shape: &[u64],
        strides: &[u64],
    ) -> Result<()> {
        let (name, (device, ptr)) = (name.as_ref(), place);
        let (memory, backend) = (self.memories.regions.len(), self.backend().info().name);
        let tensor = RawTensor { name, device, ptr, dtype, shape, strides };
        if let Some(region) = self.list.add_as_before(memory, backend, &tensor) {
            self.memories.regions.push(region);
            return Ok(());
        }
        let layout = TensorLayout::strided(dtype, shape, strides).map_err(Error::from);
        let layout = layout.map_err(|error| error.of_tensor(name))?;
        let range = DeviceRange::new(device, ptr, layout.span_bytes());
        self.add(memory, range, NamedTensor { name, offset: 0, layout: &layout })?;
        self.memories.regions.push(Region::new(backend, range).with_dtype(dtype));
        Ok(())
    }

    /// Adds memory without an owner; see [`Ipc::share_borrowed`](crate::Ipc::share_borrowed).
    ///
    /// # Safety
    ///
    /// The region must stay allocated, and must not be given to another owner, until the export has been closed
    /// ([`Export::close`](crate::Export::close) returned without an error).
    #[allow(unsafe_code, reason = "takes memory on trust that it does not own")]
    pub unsafe fn memory_borrowed(&mut self, region: Region) -> MemoryId {
        self.memories.borrowed.push(self.memories.regions.len());
        self.add_memory(region, ())
    }

    /// Adds a tensor whose layout counts from `byte_offset` after the start of the memory. Tensors may overlap.
    ///
    /// # Errors
    ///
    /// [`Error::Descriptor`], which names the tensor: for a name that is empty, longer than 1024 bytes or used already, a
    /// layout that does not fit the memory, or a first element that is not at a multiple of the element size;
    /// [`Error::InvalidRegion`] for memory of another set, or too many tensors. The set is unchanged.
    pub fn tensor(
        &mut self,
        name: impl AsRef<str>,
        memory: MemoryId,
        byte_offset: u64,
        layout: TensorLayout,
    ) -> Result<()> {
        self.add_in(memory, NamedTensor { name: name.as_ref(), offset: byte_offset, layout: &layout })
    }

    /// Adds memory with one tensor: of this layout, or of the owner's element type and one dimension.
    ///
    /// # Errors
    ///
    /// As for [`tensor`](Self::tensor); [`LayoutError::NoDtype`] if neither states the element type;
    /// [`LayoutError::NotWholeElements`] if there is no layout and the memory is no whole number of elements. All are in an
    /// [`RecoverableError`], which contains the owner.
    pub fn owned<M, O: DeviceOwner<M>>(
        &mut self,
        name: impl AsRef<str>,
        owner: O,
        layout: Option<TensorLayout>,
    ) -> Result<MemoryId, RecoverableError<O>> {
        let region = owner.region();
        let layout = layout.map_or_else(|| layout_of(&region), Ok);
        let added = layout.and_then(|layout| {
            let tensor = NamedTensor { name: name.as_ref(), offset: 0, layout: &layout };
            self.add(self.memories.regions.len(), region.range, tensor)
        });
        match added {
            Ok(()) => Ok(self.memory(owner)),
            Err(error) => {
                let owner = DeviceBound::of_region(self.backend(), &region, owner);
                Err(RecoverableError::bound(error, owner))
            }
        }
    }

    /// Returns the number of tensors.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Returns whether there are no tensors.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) const fn backend(&self) -> &Arc<dyn DeviceIpc> {
        self.owners.backend()
    }

    pub(super) const fn memories(&self) -> &Memories {
        &self.memories
    }

    /// Returns the tensors, each with the memory that its offset counts from.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = (NamedTensor<'_>, DeviceRange)> {
        (0..self.len()).map(|position| {
            let mut tensor = self.list.table().at(position);
            let memory = self.list.memory_of()[position] as usize;
            if let List::AsBefore(before, _) = &self.list {
                tensor.offset -= before.gathered.places[memory].offset;
            }
            (tensor, self.memories.regions[memory].range)
        })
    }

    pub(super) fn take_owners(&mut self) -> Owners {
        let none = Owners::new(self.owners.backend());
        std::mem::replace(&mut self.owners, none)
    }

    fn add_memory(&mut self, region: Region, owner: impl Any + Send) -> MemoryId {
        self.owners.add(&region, owner);
        self.memories.regions.push(region);
        MemoryId { set: self.number, index: self.memories.regions.len() - 1 }
    }

    /// Returns the places of the memories and the handles of each part's allocations: remembered ones if `may_be_remembered`,
    /// otherwise from the driver.
    pub(super) fn gathered(
        &self,
        runtime: &'static Runtime,
        backend: &Arc<dyn DeviceIpc>,
        given: &Memories,
        memories: &[Region],
        may_be_remembered: bool,
    ) -> Result<(Arc<Gathered>, Vec<Handles>)> {
        if may_be_remembered && let Some(known) = RememberedSet::of_the_same(backend, memories) {
            return Ok(known);
        }
        let gathered = gather(runtime, backend, memories, |index| given.is_borrowed(index));
        let (gathered, handles) =
            gathered.map_err(|(memory, error)| self.with_first_tensor(error, |other| other == memory))?;
        Ok((Arc::new(gathered), handles))
    }

    /// Adds a tensor in a memory of this set.
    fn add_in(&mut self, memory: MemoryId, tensor: NamedTensor<'_>) -> Result<()> {
        let known = if memory.set == self.number { self.memories.regions.get(memory.index) } else { None };
        let region = known.ok_or_else(|| {
            Error::InvalidRegion(format!("the memory of tensor {:?} belongs to another set", tensor.name))
        })?;
        let range = region.range;
        self.add(memory.index, range, tensor)
    }

    /// Adds a tensor in the memory with this index and range.
    fn add(&mut self, memory: usize, range: DeviceRange, tensor: NamedTensor<'_>) -> Result<()> {
        check_name(tensor.name)?;
        if self.list.len() >= MAX_TENSORS {
            return Err(Error::InvalidRegion(format!("a set has at most {MAX_TENSORS} tensors")));
        }
        tensor.check_fits(range.len)?;
        if range.len > 0 {
            let address = range.ptr.get().wrapping_add(tensor.offset);
            check_alignment(tensor.layout.dtype(), address).map_err(|cause| tensor.senseless(cause))?;
        }
        self.list.add(memory, tensor)
    }

    /// Returns the size of the tensors in the descriptor in bytes.
    pub(super) fn encoded_bytes(&self) -> usize {
        match &self.list {
            // An upper bound, far below the limit.
            List::AsBefore(before, _) => before.tensors.section_bytes(),
            List::Anew(table, _) => encoded_tensor_bytes(table),
        }
    }

    /// Returns the tensors with their places in the regions. Remembers the set with the handles of its parts, unless it has memory
    /// that only this export uses.
    pub(super) fn into_tensors(
        mut self,
        gathered: Arc<Gathered>,
        handles: Option<&[Handles]>,
    ) -> Arc<Tensors> {
        let (tensors, memory_of) = match &self.list {
            List::AsBefore(before, count)
                if *count == before.memory_of.len() && gathered.has_same_places(&before.gathered) =>
            {
                if Arc::ptr_eq(&gathered, &before.gathered) {
                    return Arc::clone(&before.tensors);
                }
                (Arc::clone(&before.tensors), before.memory_of.clone())
            }
            _ => self.list.placed(&gathered),
        };
        let Some(handles) = handles else { return tensors };
        let allocations = handles.iter().map(Arc::downgrade).collect();
        let memories = self.memories.regions;
        RememberedSet { memories, gathered, allocations, tensors: Arc::clone(&tensors), memory_of }
            .remember();
        tensors
    }

    /// Adds the name of the first tensor in a region of a part, or in any of its regions, to an error.
    pub(super) fn with_tensor_of(
        &self,
        gathered: &Gathered,
        part: usize,
        region: Option<usize>,
        error: Error,
    ) -> Error {
        self.with_first_tensor(error, |memory| {
            let place = gathered.places[memory];
            place.part == part && region.is_none_or(|region| place.region == region)
        })
    }

    /// Adds the name of the first tensor in such a memory to an error.
    fn with_first_tensor(&self, error: Error, is_concerned: impl Fn(usize) -> bool) -> Error {
        match self.list.memory_of().iter().position(|memory| is_concerned(*memory as usize)) {
            Some(position) => error.of_tensor(self.list.table().at(position).name),
            None => error,
        }
    }
}

impl fmt::Debug for TensorSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorSet")
            .field("memories", &self.memories.regions.len())
            .field("tensors", &self.len())
            .finish_non_exhaustive()
    }
}

fn layout_of(region: &Region) -> Result<TensorLayout> {
    let dtype = region.dtype.ok_or(LayoutError::NoDtype)?;
    Ok(TensorLayout::to_end(dtype, 0, region.range.len)?)
}
