//! What an agent is told about bundles.

use device_ipc_core::{
    Buffer, BundleDescriptor, DeviceOrdinal, DeviceRange, Dtype, Error, OwnedRegion, Region, Result,
    TensorLayout,
};

use super::{Agent, Words};

impl Agent {
    /// `share-bundle NAME COUNT BYTES [neighbours=1] [devices=COUNT]`: so many allocations of so many bytes, in the order of their addresses
    /// one tensor of bytes in each, `t0` and so on; on the first devices in turn. With `neighbours` two pieces of memory instead, which overlap: `a` in the
    /// first two thirds of the allocations, and `b` in the last two thirds.
    pub(super) fn share_bundle(&mut self, words: &Words<'_>) -> Result<String> {
        let (count, bytes) = (words.number(1) as u64, words.number(2) as u64);
        let devices = words.number_of("devices").unwrap_or(1);
        let ipc = self.ipc().clone();
        let mut buffers: Vec<_> =
            (0..count).map(|index| ipc.allocate((index % devices) as u32, bytes)).collect::<Result<_>>()?;
        buffers.sort_by_key(|buffer| buffer.range().ptr);
        let mut bundle = ipc.bundle();
        if words.setting("neighbours").is_some() {
            let first = buffers[0].range().ptr;
            let whole = DeviceRange::new(DeviceOrdinal::new(0), first, count * bytes);
            let third = count / 3 * bytes;
            let of = |offset, len| {
                let range = whole.slice(offset, len).expect("it lies inside");
                Region::new(self.backend().info().name, range)
            };
            let layout = TensorLayout::contiguous(Dtype::U8, [2 * third])?;
            // SAFETY: the first owner keeps all the buffers as long as the bundle lives; they are neighbours, as the share
            // would fail where one is missing.
            let owners = unsafe {
                (OwnedRegion::new(buffers, of(0, 2 * third)), OwnedRegion::new((), of(third, 2 * third)))
            };
            bundle.owned("b", owners.1, Some(layout.clone())).map_err(Error::from)?;
            bundle.owned("a", owners.0, Some(layout)).map_err(Error::from)?;
        } else {
            for (index, buffer) in buffers.into_iter().enumerate() {
                let layout = TensorLayout::contiguous(Dtype::U8, [bytes])?;
                bundle.owned::<(), Buffer>(format!("t{index}"), buffer, Some(layout)).map_err(Error::from)?;
            }
        }
        let export = bundle.start().map_err(Error::from)?;
        let descriptor = export.descriptor().to_string();
        self.bundles.insert(words.name(0).to_owned(), export);
        Ok(descriptor)
    }

    /// `open-bundle NAME DESCRIPTOR`: at home; how many tensors there are.
    pub(super) fn open_bundle(&mut self, words: &Words<'_>) -> Result<String> {
        let descriptor: BundleDescriptor = words.name(1).parse()?;
        let mapping = self.ipc().open_bundle(&descriptor).at_home()?;
        let tensors = mapping.len();
        self.open_bundles.insert(words.name(0).to_owned(), mapping);
        Ok(tensors.to_string())
    }

    /// `fill-tensor NAME TENSOR BYTE`
    pub(super) fn fill_tensor(&mut self, words: &Words<'_>) -> Result<String> {
        let stream = self.stream()?;
        let mapping = self.open_bundles.get(words.name(0)).expect("it was opened");
        let tensor = mapping.tensor(words.name(1))?;
        tensor.view_mut::<u8, _>(&stream)?.fill_bytes(words.number(2) as u8)?;
        stream.synchronize()?;
        Ok(String::new())
    }

    /// `ends-of-tensor NAME TENSOR`: its first byte and its last.
    pub(super) fn ends_of_tensor(&mut self, words: &Words<'_>) -> Result<String> {
        let stream = self.stream()?;
        let mapping = self.open_bundles.get(words.name(0)).expect("it was opened");
        let bytes = mapping.tensor(words.name(1))?.view::<u8, _>(&stream)?.to_vec()?;
        Ok(format!("{} {}", bytes[0], bytes[bytes.len() - 1]))
    }

    /// `drop-bundle NAME`: opened or shared.
    pub(super) fn drop_bundle(&mut self, words: &Words<'_>) -> Result<String> {
        let name = words.name(0);
        let known = self.open_bundles.remove(name).is_some() | self.bundles.remove(name).is_some();
        assert!(known, "there is no {name}");
        Ok(String::new())
    }

    /// `close-bundle NAME MS`
    pub(super) fn close_bundle(&mut self, words: &Words<'_>) -> Result<String> {
        self.bundles.remove(words.name(0)).expect("it was shared").close(words.time(1))?;
        Ok(String::new())
    }
}
