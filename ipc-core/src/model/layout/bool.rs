//! The element of tensors of booleans.

use std::fmt;
use std::hash::{Hash, Hasher};

/// A byte of a tensor of [`Dtype::BOOL`](crate::Dtype::BOOL): 0 is false, any other value is true, as in PyTorch.
///
/// The library does not read such a byte as `bool`: another process or a kernel may have written a value other than 0 and
/// 1, which is undefined behaviour in a `bool`. Two values are equal if both are true or both are false.
///
/// # Examples
///
/// ```
/// use device_ipc_core::{Bool, Dtype};
///
/// # fn main() -> device_ipc_core::Result<()> {
/// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1").expect("a valid specification");
/// # let ipc = device_ipc_core::Ipc::with_backend(backend);
/// # let stream = ipc.create_stream(0)?;
/// let mask = ipc.allocate(0, 3)?;
/// mask.view_mut(&stream)?.copy_from(&[true, false, true].map(Bool::from))?;
/// let export = ipc.share(mask).dtype(Dtype::BOOL).ready_on(&stream).start()?;
///
/// let mapping = ipc.open(export.descriptor()).on(&stream)?;
/// let mask: Vec<bool> = mapping.to_host::<Bool, _>(&stream)?.into_iter().map(bool::from).collect();
/// assert_eq!(mask, [true, false, true]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub struct Bool(u8);

impl Bool {
    /// False.
    pub const FALSE: Self = Self(0);
    /// True.
    pub const TRUE: Self = Self(1);

    /// Returns whether the byte is not 0.
    pub const fn get(self) -> bool {
        self.0 != 0
    }
}

impl From<bool> for Bool {
    fn from(value: bool) -> Self {
        Self(u8::from(value))
    }
}

impl From<Bool> for bool {
    fn from(value: Bool) -> Self {
        value.get()
    }
}

impl PartialEq for Bool {
    fn eq(&self, other: &Self) -> bool {
        self.get() == other.get()
    }
}

impl Eq for Bool {}

impl Hash for Bool {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.get().hash(state);
    }
}

impl fmt::Debug for Bool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

#[cfg(test)]
mod tests;
