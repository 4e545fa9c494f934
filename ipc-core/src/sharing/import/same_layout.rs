//! Comparison of the layouts of two exports, of which one takes the addresses of the other.

use std::fmt::{Debug, Display};

use crate::model::tensor::{LayoutError, NamedTensor};
use crate::wire::descriptor::{Contents, Memory, Part};

/// Checks that every tensor of `found` has the name, the layout and the place of the tensor of `known` at the same position, in
/// regions of the same sizes.
///
/// # Errors
///
/// [`LayoutError::Differs`] with the first difference.
pub(super) fn check_same_layout(known: &Contents, found: &Contents) -> Result<(), LayoutError> {
    match (&known.memory, &found.memory) {
        (Memory::Region(known), Memory::Region(found)) => {
            same("the length of the region in bytes", &known.len, &found.len)?;
            same("the offset of the region in its allocation", &known.offset, &found.offset)?;
        }
        (Memory::Tensors(_), Memory::Tensors(_)) => {}
        _ => {
            let has_names = |contents: &Contents| matches!(contents.memory, Memory::Tensors(_));
            same("the presence of names", &has_names(known), &has_names(found))?;
        }
    }
    same("the number of tensors", &known.tensors(), &found.tensors())?;
    // Equal lists need no comparison of each tensor, and there may be very many.
    let differ = known.memory != found.memory;
    for position in (0..known.tensors()).filter(|_| differ) {
        same_tensor(position, &known.tensor(position), &found.tensor(position))?;
        let name = known.tensor(position).name;
        same(
            format_args!("the region of the tensor {name:?}"),
            &known.place(position),
            &found.place(position),
        )?;
    }
    same("the number of home devices", &known.parts.len(), &found.parts.len())?;
    for (index, (known, found)) in known.parts.iter().zip(found.parts.iter()).enumerate() {
        same_regions(index, known, found)?;
    }
    Ok(())
}

fn same_tensor(position: usize, known: &NamedTensor<'_>, found: &NamedTensor<'_>) -> Result<(), LayoutError> {
    let name = known.name;
    let of = |what| format!("the {what} of the tensor {name:?}");
    same(format_args!("the name of tensor {position}"), &name, &found.name)?;
    same(of("element type"), &known.layout.dtype(), &found.layout.dtype())?;
    same(of("shape"), &known.layout.shape(), &found.layout.shape())?;
    same(of("strides"), &known.layout.strides(), &found.layout.strides())?;
    same(of("element offset"), &known.layout.element_offset(), &found.layout.element_offset())?;
    same(of("offset in its region"), &known.offset, &found.offset)
}

fn same_regions(part: usize, known: &Part, found: &Part) -> Result<(), LayoutError> {
    let (known, found) = (known.regions.as_regions(), found.regions.as_regions());
    same(format_args!("the number of regions on home device {part}"), &known.len(), &found.len())?;
    for (region, (known, found)) in known.iter().zip(found.iter()).enumerate() {
        let what = format_args!("the size of region {region} on home device {part} in bytes");
        let bytes = |sizes: &mut dyn Iterator<Item = u64>| sizes.fold(0, u64::saturating_add);
        same(
            what,
            &bytes(&mut known.iter().map(|extent| extent.size)),
            &bytes(&mut found.iter().map(|extent| extent.size)),
        )?;
    }
    Ok(())
}

fn same<T: PartialEq + Debug>(what: impl Display, known: &T, found: &T) -> Result<(), LayoutError> {
    if known == found {
        return Ok(());
    }
    let (expected, found) = (format!("{known:?}"), format!("{found:?}"));
    Err(LayoutError::Differs { what: what.to_string(), expected, found })
}

#[cfg(test)]
mod tests;
