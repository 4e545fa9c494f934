//! Named tensors.

use device_ipc_core::{
    Access, Buffer, DeviceOrdinal, DeviceRange, Dtype, Error, Export, Region, Result, TensorLayout,
};

use super::{Server, named};
use crate::agent::{Answer, Command, TensorSharing};
use crate::flows::tensor_bytes;
use crate::unchecked;

impl Server {
    pub(super) fn carry_out_tensors(&mut self, command: Command) -> Result<Answer> {
        match command {
            Command::ShareTensors { name, sharing } => self.share_tensors(name, &sharing),
            Command::ShareBlocks { name, count, len, devices, neighbours } => {
                let ipc = self.ipc.clone();
                let devices = devices.unwrap_or(1);
                let mut buffers: Vec<_> = (0..count)
                    .map(|index| ipc.allocate((index % devices) as u32, len))
                    .collect::<Result<_>>()?;
                buffers.sort_by_key(|buffer| buffer.range().ptr);
                let export =
                    if neighbours.is_some() { self.neighbours(buffers) } else { self.blocks(buffers) }?;
                Ok(self.keep_export(name, export))
            }
            Command::TensorBytes { name, tensor } => Ok(Answer::Bytes(self.tensor_bytes(&name, &tensor)?)),
            Command::TensorEnds { name, tensor } => {
                let bytes = self.tensor_bytes(&name, &tensor)?;
                Ok(Answer::Text(format!("{} {}", bytes[0], bytes[bytes.len() - 1])))
            }
            Command::TensorFill { name, tensor, byte } => {
                let stream = self.stream_of_tensor(&name, &tensor)?;
                let found = named(&self.mappings, &name).get(&tensor)?;
                found.view_mut::<u8, _>(&stream)?.fill_bytes(byte)?;
                stream.synchronize().map(|()| Answer::Done)
            }
            Command::TensorAdd { name, tensor, value } => {
                let stream = self.stream_of_tensor(&name, &tensor)?;
                let found = named(&self.mappings, &name).get(&tensor)?;
                found.view_mut::<f32, _>(&stream)?.add(value).map(|()| Answer::Done)
            }
            other => self.carry_out_ring(other),
        }
    }

    fn stream_of_tensor(&mut self, name: &str, tensor: &str) -> Result<device_ipc_core::Stream> {
        let device = named(&self.mappings, name).get(tensor)?.device();
        self.stream(device.get())
    }

    fn tensor_bytes(&mut self, name: &str, tensor: &str) -> Result<Vec<u8>> {
        let stream = self.stream_of_tensor(name, tensor)?;
        tensor_bytes(&named(&self.mappings, name).get(tensor)?, &stream)
    }

    fn share_tensors(&mut self, name: String, sharing: &TensorSharing) -> Result<Answer> {
        let streams: Result<Vec<_>> = sharing.ready_on.iter().map(|device| self.stream(*device)).collect();
        let (streams, ipc) = (streams?, self.ipc.clone());
        let mut set = ipc.tensors();
        let mut memories = Vec::new();
        for (of, part) in &sharing.memories {
            let buffer = named(&self.buffers, of);
            let (offset, len) = part.unwrap_or((0, buffer.range().len));
            memories.push(set.memory(buffer.slice(offset, len)?));
        }
        for tensor in &sharing.tensors {
            let dtype = Dtype::from_name(&tensor.dtype).expect("a type of PyTorch");
            let layout = TensorLayout::contiguous(dtype, tensor.shape.as_slice())?;
            set.tensor(&tensor.name, memories[tensor.memory], tensor.offset, layout)?;
        }
        let share = ipc.share_all(set).access(sharing.access.unwrap_or(Access::ReadWrite));
        let export = streams.iter().fold(share, |share, stream| share.ready_on(stream)).start()?;
        Ok(self.keep_export(name, export))
    }

    fn blocks(&self, buffers: Vec<Buffer>) -> Result<Export> {
        let mut set = self.ipc.tensors();
        for (index, buffer) in buffers.into_iter().enumerate() {
            let layout = TensorLayout::contiguous(Dtype::U8, [buffer.range().len])?;
            set.owned::<(), Buffer>(format!("t{index}"), buffer, Some(layout)).map_err(Error::from)?;
        }
        Ok(self.ipc.share_all(set).start()?)
    }

    fn neighbours(&self, buffers: Vec<Buffer>) -> Result<Export> {
        let mut set = self.ipc.tensors();
        let (first, count, len) = (buffers[0].range(), buffers.len() as u64, buffers[0].range().len);
        let whole = DeviceRange::new(DeviceOrdinal::new(0), first.ptr, count * len);
        let third = count / 3 * len;
        let of = |offset| {
            let range = whole.slice(offset, 2 * third).expect("it is inside");
            Region::new(self.backend.info().name, range)
        };
        let layout = TensorLayout::contiguous(Dtype::U8, [2 * third])?;
        // The first owner keeps all buffers as long as the export exists. The share fails unless they are adjacent.
        let (a, b) = (unchecked::owned(buffers, of(0)), unchecked::owned((), of(third)));
        set.owned("b", b, Some(layout.clone())).map_err(Error::from)?;
        set.owned("a", a, Some(layout)).map_err(Error::from)?;
        Ok(self.ipc.share_all(set).start()?)
    }
}
