//! The tensors of a mapping, and views of an unnamed region.

use super::mapping::Mapping;
use super::tensor::Tensor;
use super::view_owner::ViewOwner;
use crate::backend::interop::{ViewStream, ViewTypes};
use crate::backend::stream::AsStream;
use crate::model::address::DeviceRange;
use crate::model::error::{Error, Remedy, Result};
use crate::model::tensor::{Element, LayoutError, TensorTable};

impl Mapping {
    /// Returns a view of the elements for reading by work on `stream`. The stream waits until the bytes are ready.
    ///
    /// The type of the view depends on the stream: [`View`](crate::View) for a [`Stream`](crate::Stream), and an argument for
    /// cudarc's kernels and copies for cudarc's `CudaStream`. Name the element type only if it cannot be inferred:
    /// `mapping.view::<f32, _>(&stream)`.
    ///
    /// # Errors
    ///
    /// [`Error::WrongStream`] for a stream of another device; [`Error::Layout`] for another element type than the
    /// tensor's, a tensor with gaps, or bytes that are not whole, aligned elements.
    pub fn view<T: Element, M: ViewTypes>(&self, stream: &impl ViewStream<M>) -> Result<M::View<'_, T>> {
        ViewOwner::from(self.first_part()).view(self.viewable()?, self.layout(), stream)
    }

    /// Returns a view of the elements for reading and writing by work on `stream`. The stream waits until the bytes are ready.
    ///
    /// # Errors
    ///
    /// As [`view`](Self::view), and [`Error::AccessDenied`] for a read-only mapping.
    pub fn view_mut<T: Element, M: ViewTypes>(
        &self,
        stream: &impl ViewStream<M>,
    ) -> Result<M::ViewMut<'_, T>> {
        ViewOwner::from(self.first_part()).view_mut(self.viewable()?, self.layout(), stream)
    }

    /// Returns a view of the bytes for reading by work on `stream`: of a tensor of any element type and with any strides. The
    /// stream waits until the bytes are ready.
    ///
    /// They are those from the tensor's first element to the end of its last one, with the gaps between them; without a tensor,
    /// all bytes of the region.
    ///
    /// # Errors
    ///
    /// [`Error::WrongStream`] for a stream of another device. [`LayoutError::Named`] for named tensors.
    pub fn view_bytes<M: ViewTypes>(&self, stream: &impl ViewStream<M>) -> Result<M::View<'_, u8>> {
        ViewOwner::from(self.first_part()).view_bytes(self.viewable()?, stream)
    }

    /// Returns a view of the bytes for reading and writing by work on `stream`.
    ///
    /// # Errors
    ///
    /// As for [`view_bytes`](Self::view_bytes), and [`Error::AccessDenied`] for memory that was opened read-only.
    pub fn view_bytes_mut<M: ViewTypes>(&self, stream: &impl ViewStream<M>) -> Result<M::ViewMut<'_, u8>> {
        ViewOwner::from(self.first_part()).view_bytes_mut(self.viewable()?, stream)
    }

    /// Copies the elements to the host in row-major order, and waits for the copy. The stream waits first until the bytes are
    /// ready.
    ///
    /// The elements of a tensor with gaps are gathered: the bytes from its first element to its last are copied, and the host
    /// picks the elements.
    ///
    /// # Errors
    ///
    /// [`Error::WrongStream`] for a stream of another device; [`Error::Layout`] for another element type than the
    /// tensor's ([`to_host_bytes`](Self::to_host_bytes) takes any), or bytes that are not whole, aligned elements;
    /// [`Error::Io`] if the host has no memory for the elements; otherwise the vendor's error. [`LayoutError::Named`] for named tensors.
    ///
    /// # Examples
    ///
    /// ```
    /// use device_ipc_core::Dtype;
    ///
    /// # fn main() -> device_ipc_core::Result<()> {
    /// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1").expect("a valid specification");
    /// # let ipc = device_ipc_core::Ipc::with_backend(backend);
    /// # let stream = ipc.create_stream(0)?;
    /// let memory = ipc.allocate(0, 6 * 4)?;
    /// memory.view_mut(&stream)?.copy_from(&[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0])?;
    /// let transposed = ipc.share(memory).dtype(Dtype::F32).shape([3, 2]).strides([1, 3]);
    /// let export = transposed.ready_on(&stream).start()?;
    ///
    /// let mapping = ipc.open(export.descriptor()).on(&stream)?;
    /// let elements: Vec<f32> = mapping.to_host(&stream)?;
    /// assert_eq!(elements, [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn to_host<T: Element, M>(&self, stream: &impl AsStream<M>) -> Result<Vec<T>> {
        ViewOwner::from(self.first_part()).to_host(self.viewable()?, self.layout(), stream.as_stream())
    }

    /// Copies the bytes of the elements to the host, as [`to_host`](Self::to_host) does: for any element type.
    ///
    /// # Errors
    ///
    /// As for [`to_host`](Self::to_host), except that no element type is wrong.
    pub fn to_host_bytes<M>(&self, stream: &impl AsStream<M>) -> Result<Vec<u8>> {
        ViewOwner::from(self.first_part()).to_host_bytes(self.viewable()?, self.layout(), stream.as_stream())
    }

    /// Returns the range of the tensor, or of the region without a layout.
    fn viewable(&self) -> Result<DeviceRange> {
        self.check_unnamed()?;
        self.layout().map_or(Ok(self.range), |layout| Ok(layout.elements_in(self.range)?))
    }

    fn check_unnamed(&self) -> Result<()> {
        if self.range.len > 0 { Ok(()) } else { Err(LayoutError::Named(self.tensors().len()).into()) }
    }

    /// Returns the tensor of an unnamed region.
    ///
    /// # Errors
    ///
    /// [`LayoutError::NoTensor`] if the exporter stated no layout; [`LayoutError::Named`] for named tensors.
    pub fn tensor(&self) -> Result<Tensor<'_>> {
        self.check_unnamed()?;
        Tensor::new(self.first_part(), self.range, self.layout().ok_or(LayoutError::NoTensor)?)
    }

    /// Returns the tensor of this name.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`].
    pub fn get(&self, name: &str) -> Result<Tensor<'_>> {
        match self.descriptor.contents().table() {
            Some(table) => self.at(table.find(name)?),
            None if name.is_empty() => self.tensor(),
            None => {
                let known = format!("there is one region, without a name; {}", Remedy::TakeUnnamed);
                Err(Error::NoSuchTensor { name: name.to_owned(), known })
            }
        }
    }

    /// Returns the tensors with their names, in the order in which the exporter added them. The tensor of an unnamed region has
    /// an empty name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, Tensor<'_>)> {
        let contents = self.descriptor.contents();
        (0..contents.tensors()).map(|position| {
            let found = self
                .at(position)
                .expect("it was checked when the mapping was opened that it lies in its region");
            (contents.tensor(position).name, found)
        })
    }

    fn at(&self, position: usize) -> Result<Tensor<'_>> {
        let contents = self.descriptor.contents();
        if contents.region().is_some() {
            return self.tensor();
        }
        let (index, region) = contents.place(position);
        let part = &self.parts[index];
        let tensor = contents.tensor(position);
        Ok(Tensor::at(part, part.elements_of(region, &tensor)?, tensor.layout))
    }

    /// Returns the tensor of this name in a table that describes the region.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`]; [`Error::Descriptor`] for a tensor that does not fit the region; [`LayoutError::Named`] if the
    /// tensors are named already.
    pub fn tensor_in<'m>(&'m self, table: &'m TensorTable, name: &str) -> Result<Tensor<'m>> {
        self.check_unnamed()?;
        Tensor::in_table(self.first_part(), self.range, table, name)
    }
}
