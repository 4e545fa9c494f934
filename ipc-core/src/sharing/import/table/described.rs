//! What a descriptor says of its memory, kept once for all mappings of a lease.
//!
//! Where it leads the lease knows: which export, of whom, by which token.

use super::keys::LeaseKey;
use super::lease::Lease;
use crate::backend::Access;
use crate::model::device::DeviceIdentity;
use crate::model::tensor::TensorLayout;
use crate::sharing::import::cache::Kept;
use crate::wire::descriptor::{DescribedExtent, Descriptor};

#[derive(Debug)]
pub(in crate::sharing::import) struct Described {
    pub(in crate::sharing::import) home: DeviceIdentity,
    access: Access,
    ready: bool,
    offset: u64,
    len: u64,
    extents: Box<[DescribedExtent]>,
    layout: Option<Box<TensorLayout>>,
}

impl Described {
    fn by(descriptor: &Descriptor) -> Self {
        let Descriptor { home, access, ready, offset, len, ref extents, ref layout, .. } = *descriptor;
        let (extents, layout) = (extents.as_slice().into(), layout.clone().map(Box::new));
        Self { home, access, ready, offset, len, extents, layout }
    }

    fn is_by(&self, descriptor: &Descriptor) -> bool {
        let Descriptor { home, access, ready, offset, len, ref extents, ref layout, .. } = *descriptor;
        (self.offset, self.len, self.access, self.ready) == (offset, len, access, ready)
            && self.home == home
            && *self.extents == **extents
            && self.layout() == layout.as_ref()
    }

    pub(in crate::sharing::import) fn layout(&self) -> Option<&TensorLayout> {
        self.layout.as_deref()
    }
}

impl Kept<LeaseKey, Lease> {
    /// Does a descriptor that leads to this lease say of the memory what that of the first mapping does? It may be that
    /// one.
    pub(in crate::sharing::import) fn is_described_by(&self, descriptor: &Descriptor) -> bool {
        self.described.get_or_init(|| Described::by(descriptor)).is_by(descriptor)
    }

    /// What mappings were opened by, where their descriptors say so; with the broker that was reached.
    pub(in crate::sharing::import) fn descriptor(&self) -> Option<Descriptor> {
        let Described { home, access, ready, offset, len, extents, layout } = self.described.get()?;
        Some(Descriptor {
            backend: self.backend().info().name.into(),
            home: *home,
            exporter: *self.key().exporter,
            broker: self.link.broker().clone(),
            export: self.key().export,
            token: self.key().token,
            access: *access,
            ready: *ready,
            offset: *offset,
            len: *len,
            extents: extents.to_vec(),
            layout: layout.as_deref().cloned(),
        })
    }
}
