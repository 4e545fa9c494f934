//! What was put into a bundle so far, and what is remembered of the last ones.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use super::builder::MemoryId;
use super::gather::Gathered;
use super::owners::Owners;
use crate::backend::interop::Region;
use crate::backend::{Access, DeviceIpc};
use crate::model::address::DeviceRange;
use crate::model::error::{Error, Result};
use crate::model::tensor::{MAX_TENSORS, NamedTensor, TensorTable, check_alignment, check_name};
use crate::os::Recent;
use crate::sharing::export::{Allocation, Handles};
use crate::wire::bundle::{MOST_REMEMBERED_BYTES, Tensors, encoded_tensor_bytes};

/// What was put in so far.
pub struct Draft {
    /// Tells the memories of one bundle from another's.
    number: u64,
    pub(super) access: Access,
    pub(super) memories: Vec<Region>,
    pub(super) owners: Owners,
    list: List,
}

/// The tensors that were put in so far, and the memory that each of them lies in.
enum List {
    /// As many as were put in are the first ones of an earlier bundle.
    AsBefore(Arc<Made>, usize),
    /// Their places count from the start of their memory.
    Anew(TensorTable, Vec<u32>),
}

/// What is remembered of a bundle that was made. It keeps nothing of the memory.
#[derive(Debug)]
pub(super) struct Made {
    memories: Vec<Region>,
    gathered: Arc<Gathered>,
    /// Those of each part, as long as an export has them.
    allocations: Vec<Weak<[Arc<Allocation>]>>,
    tensors: Arc<Tensors>,
    /// The memory that each of them lies in.
    lie_in: Vec<u32>,
}

/// What was made last. Whoever hands the same tensors over again, with other numbers in them, has them described already.
static MADE: Recent<Made> = Recent::new();

impl Made {
    /// Remembers it, in the place of one of the same tensors.
    fn remember(self) {
        if self.tensors.bytes().len() <= MOST_REMEMBERED_BYTES {
            let tensors = Arc::clone(&self.tensors);
            MADE.remember(Arc::new(self), |known| Arc::ptr_eq(&known.tensors, &tensors));
        }
    }

    /// Where these memories lie, and the handles of their allocations, by a bundle that was made of the same ones, while
    /// exports keep all of them allocated: what lies there and is allocated now lies in them, then.
    pub(super) fn of_the_same(
        backend: &Arc<dyn DeviceIpc>,
        memories: &[Region],
    ) -> Option<(Arc<Gathered>, Vec<Handles>)> {
        let known = MADE.find(|known| known.memories == memories)?;
        let allocations: Option<Vec<_>> = known.allocations.iter().map(Weak::upgrade).collect();
        let allocations = allocations?;
        let is_kept = |allocation: &Arc<Allocation>| allocation.is_kept() && allocation.is_of(backend);
        let kept = allocations.iter().flat_map(|part| part.iter()).all(is_kept);
        kept.then(|| (Arc::clone(&known.gathered), allocations))
    }

    /// Is the tensor at this position that one?
    fn has(&self, position: usize, memory: usize, tensor: NamedTensor<'_>) -> bool {
        if self.lie_in.get(position) != Some(&(memory as u32)) {
            return false;
        }
        let known = self.tensors.table().at(position);
        known.name == tensor.name
            && Some(known.offset) == self.gathered.places[memory].offset.checked_add(tensor.offset)
            && known.layout == tensor.layout
    }
}

impl List {
    /// Adds a tensor, unless its name is another one's.
    fn add(&mut self, memory: usize, tensor: NamedTensor<'_>) -> Result<()> {
        if self.len() == 0 {
            let before = MADE.find(|known| known.has(0, memory, tensor));
            *self = before.map_or_else(Self::default, |before| Self::AsBefore(before, 0));
        }
        if let Self::AsBefore(before, count) = self
            && before.has(*count, memory, tensor)
        {
            *count += 1;
            return Ok(());
        }
        let (table, lie_in) = self.anew();
        table.push(tensor.name, tensor.offset, tensor.layout.clone())?;
        lie_in.push(memory as u32);
        Ok(())
    }

    /// The list, which is no longer that of an earlier bundle.
    fn anew(&mut self) -> (&mut TensorTable, &mut Vec<u32>) {
        if let Self::AsBefore(before, count) = self {
            let in_memory =
                |position, offset| offset - before.gathered.places[before.lie_in[position] as usize].offset;
            let table = before.tensors.table().first(*count, in_memory);
            let lie_in = before.lie_in[..*count].to_vec();
            *self = Self::Anew(table, lie_in);
        }
        match self {
            Self::Anew(table, lie_in) => (table, lie_in),
            Self::AsBefore(..) => unreachable!("it was replaced"),
        }
    }

    /// The tensors with their places in the regions, and the memory that each of them lies in.
    fn placed(&mut self, gathered: &Gathered) -> (Arc<Tensors>, Vec<u32>) {
        let (table, lie_in) = self.anew();
        let (mut table, lie_in) = (std::mem::take(table), std::mem::take(lie_in));
        // Each fits its memory, which fits its region.
        table.move_each(|position| gathered.places[lie_in[position] as usize].offset);
        let of_memories = gathered.regions();
        let regions = lie_in.iter().map(|memory| of_memories[*memory as usize]).collect();
        (Arc::new(Tensors::new(table, regions)), lie_in)
    }

    fn len(&self) -> usize {
        match self {
            Self::AsBefore(_, count) => *count,
            Self::Anew(table, _) => table.len(),
        }
    }

    fn lie_in(&self) -> &[u32] {
        match self {
            Self::AsBefore(before, count) => &before.lie_in[..*count],
            Self::Anew(_, lie_in) => lie_in,
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

impl Draft {
    pub(super) fn new(backend: &Arc<dyn DeviceIpc>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            access: Access::ReadWrite,
            memories: Vec::new(),
            owners: Owners::new(backend),
            list: List::default(),
        }
    }

    pub(super) fn tensors(&self) -> usize {
        self.list.len()
    }

    pub(super) fn add_memory(&mut self, region: Region, owner: impl Any + Send) -> MemoryId {
        self.memories.push(region);
        self.owners.add(&region, owner);
        MemoryId { draft: self.number, index: self.memories.len() - 1 }
    }

    /// Adds a tensor in memory that was put in.
    pub(super) fn add_in(&mut self, memory: MemoryId, tensor: NamedTensor<'_>) -> Result<()> {
        let known = if memory.draft == self.number { self.memories.get(memory.index) } else { None };
        let region = known.ok_or_else(|| {
            Error::InvalidRegion(format!("the memory of tensor {:?} belongs to another bundle", tensor.name))
        })?;
        let range = region.range;
        self.add(memory.index, range, tensor)
    }

    /// Adds a tensor in the memory that will be put in next.
    pub(super) fn add_in_next(&mut self, region: &Region, tensor: NamedTensor<'_>) -> Result<()> {
        self.add(self.memories.len(), region.range, tensor)
    }

    /// Adds a tensor in the memory of this number and range.
    fn add(&mut self, memory: usize, range: DeviceRange, tensor: NamedTensor<'_>) -> Result<()> {
        check_name(tensor.name)?;
        if self.list.len() >= MAX_TENSORS {
            return Err(Error::InvalidRegion(format!("a bundle has at most {MAX_TENSORS} tensors")));
        }
        tensor.check_fits(range.len)?;
        if range.len > 0 {
            let address = range.ptr.get().wrapping_add(tensor.offset);
            check_alignment(tensor.layout.dtype(), address).map_err(|cause| tensor.senseless(cause))?;
        }
        self.list.add(memory, tensor)
    }

    /// How many bytes the list of tensors has in the descriptor.
    pub(super) fn encoded_bytes(&self) -> usize {
        match &self.list {
            // Or fewer, and far below the limit either way.
            List::AsBefore(before, _) => before.tensors.bytes().len(),
            List::Anew(table, _) => encoded_tensor_bytes(table),
        }
    }

    /// The tensors with their places in the regions. What has to be remembered of the bundle is what is not yet; nothing, where
    /// it has memory of its own (`may_be_known` is false).
    pub(super) fn into_tensors(
        mut self,
        gathered: Arc<Gathered>,
        allocations: &[Handles],
        may_be_known: bool,
    ) -> Arc<Tensors> {
        let (tensors, lie_in) = match &self.list {
            List::AsBefore(before, count)
                if *count == before.lie_in.len() && gathered.lies_as(&before.gathered) =>
            {
                if Arc::ptr_eq(&gathered, &before.gathered) {
                    return Arc::clone(&before.tensors);
                }
                (Arc::clone(&before.tensors), before.lie_in.clone())
            }
            _ => self.list.placed(&gathered),
        };
        if !may_be_known {
            return tensors;
        }
        let allocations = allocations.iter().map(Arc::downgrade).collect();
        let memories = self.memories;
        Made { memories, gathered, allocations, tensors: Arc::clone(&tensors), lie_in }.remember();
        tensors
    }

    /// The same error, about the first tensor in that memory.
    pub(super) fn blame(&self, memory: usize, error: Error) -> Error {
        self.blame_first(|lies_in| lies_in == memory, error)
    }

    /// The same error, about the first tensor in that region of that part.
    pub(super) fn blame_part(
        &self,
        gathered: &Gathered,
        (part, region): (usize, Option<usize>),
        error: Error,
    ) -> Error {
        let lies_there = |memory: usize| {
            let place = gathered.places[memory];
            place.part == part && region.is_none_or(|region| place.region == region)
        };
        self.blame_first(lies_there, error)
    }

    /// The same error, about the first tensor in such memory.
    fn blame_first(&self, is_it: impl Fn(usize) -> bool, error: Error) -> Error {
        match self.list.lie_in().iter().position(|memory| is_it(*memory as usize)) {
            Some(position) => error.of_tensor(self.list.table().at(position).name),
            None => error,
        }
    }
}
