//! The descriptor of a ring. `docs/spec/ring.md` is its specification; the two change together.

use std::fmt;

use serde::Serialize;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::backend::Access;
use crate::model::device::DeviceIdentity;
use crate::os::process::ProcessIdentity;
use crate::wire::descriptor::{
    CHECKSUM_BYTES, Descriptor, DescriptorError, DescriptorView, ExportId, Form, FormatVersion,
    MAX_DESCRIPTOR_BYTES, Preamble, close, text_and_serde,
};

/// A slot begins and ends at a multiple of this many bytes from the ring's begin, so that its elements are as aligned as the
/// ring's.
pub(crate) const ALIGNMENT: u64 = 256;

/// What the text form of a ring's descriptor begins with; the rest is the binary form in URL-safe Base64 without padding
/// (RFC 4648 §5).
pub const RING_TEXT_PREFIX: &str = "dipcr.";

/// The most slots that a ring may have.
pub const MAX_RING_SLOTS: u32 = 1 << 16;

const FORM: Form = Form {
    magic: *b"DIPR",
    version: FormatVersion { major: 1, minor: 0 },
    what: "ring",
    most_bytes: MAX_RING_BYTES,
    known_flags: 0,
    otherwise: DescriptorError::NotRing,
};
/// The largest descriptor of a ring: the fixed part, the longest descriptor of an export, and the checksum.
pub(crate) const MAX_RING_BYTES: usize = size_of::<Head>() + MAX_DESCRIPTOR_BYTES + CHECKSUM_BYTES;

/// The part of fixed size; no byte of it is padding.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Head {
    preamble: Preamble,
    slots: U32,
    slot_bytes: U64,
    memory_bytes: U32,
}

/// Names a ring. Get one from [`Ring::descriptor`](crate::Ring::descriptor), send it by any road, and give it to
/// [`Ipc::open_ring`](crate::Ipc::open_ring).
///
/// `Display` and `FromStr` are the text form, `dipcr.…`. It holds the secret of the memory's [`Descriptor`]: treat it alike.
#[derive(Clone, PartialEq, Eq)]
pub struct RingDescriptor {
    memory: Descriptor,
    slots: u32,
    slot_bytes: u64,
}

/// Everything in a ring's descriptor but its secret. Serialise it as JSON to read it.
#[derive(Clone, Debug, Serialize)]
pub struct RingView<'a> {
    slots: u32,
    slot_bytes: u64,
    memory: DescriptorView<'a>,
}

impl RingDescriptor {
    /// `None` where the slots do not lie in the memory.
    pub(crate) fn new(memory: Descriptor, slots: u32, slot_bytes: u64) -> Option<Self> {
        let needed = slot_bytes.checked_mul(u64::from(slots))?;
        let good = (1..=MAX_RING_SLOTS).contains(&slots)
            && slot_bytes > 0
            && slot_bytes.is_multiple_of(ALIGNMENT)
            && needed <= memory.len();
        good.then_some(Self { memory, slots, slot_bytes })
    }

    pub(crate) const fn memory(&self) -> &Descriptor {
        &self.memory
    }

    /// How many slots there are.
    pub const fn slots(&self) -> u32 {
        self.slots
    }

    /// Bytes of a slot: a multiple of 256.
    pub const fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// The name of the backend that can open the memory.
    pub fn backend(&self) -> &str {
        self.memory.backend()
    }

    /// The device where the bytes live.
    pub const fn home(&self) -> DeviceIdentity {
        self.memory.home()
    }

    /// The writing process.
    pub const fn writer(&self) -> &ProcessIdentity {
        self.memory.exporter()
    }

    /// The number of the memory's export in that process.
    pub const fn export(&self) -> ExportId {
        self.memory.export()
    }

    /// What readers may do with the memory.
    pub const fn access(&self) -> Access {
        self.memory.access()
    }

    /// For people: everything but the secret, ready for JSON.
    pub fn view(&self) -> RingView<'_> {
        RingView { slots: self.slots, slot_bytes: self.slot_bytes, memory: self.memory.view() }
    }

    /// The binary form.
    pub fn to_bytes(&self) -> Vec<u8> {
        let memory = self.memory.to_bytes();
        let total = size_of::<Head>() + memory.len() + CHECKSUM_BYTES;
        let head = Head {
            preamble: FORM.preamble(0, total),
            slots: U32::new(self.slots),
            slot_bytes: U64::new(self.slot_bytes),
            memory_bytes: U32::new(memory.len() as u32),
        };
        let mut bytes = Vec::with_capacity(total);
        bytes.extend_from_slice(head.as_bytes());
        bytes.extend_from_slice(&memory);
        close(&mut bytes);
        bytes
    }

    /// Reads the binary form. The bytes may come from anybody.
    ///
    /// # Errors
    ///
    /// [`DescriptorError`] with what is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DescriptorError> {
        let (head, body) = FORM.checked_parts::<Head>(bytes)?;
        let memory = body
            .get(..head.memory_bytes.get() as usize)
            .ok_or_else(|| bad("length", "its fields need more bytes than there are"))?;
        let memory = Descriptor::from_bytes(memory)?;
        let (slots, slot_bytes, len) = (head.slots.get(), head.slot_bytes.get(), memory.len());
        Self::new(memory, slots, slot_bytes).ok_or_else(|| {
            bad(
                "slots",
                &format!("{slots} slots of {slot_bytes} bytes in {len} bytes, 256 bytes or a multiple each"),
            )
        })
    }
}

fn bad(field: &'static str, why: &str) -> DescriptorError {
    DescriptorError::BadField { field, why: why.to_owned() }
}

/// Without the secret.
impl fmt::Debug for RingDescriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingDescriptor")
            .field("slots", &self.slots)
            .field("slot_bytes", &self.slot_bytes)
            .field("memory", &self.memory)
            .finish()
    }
}

text_and_serde!(
    RingDescriptor,
    prefix: RING_TEXT_PREFIX,
    most_bytes: MAX_RING_BYTES,
    otherwise: DescriptorError::NotRingText,
    called: "the descriptor of a device-ipc ring"
);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzzing::plain_descriptor;

    fn example() -> RingDescriptor {
        let memory = Descriptor { len: 4096, offset: 0, ..plain_descriptor() };
        let extents = vec![crate::wire::descriptor::DescribedExtent { size: 8192, generation: 0 }];
        RingDescriptor::new(Descriptor { extents, layout: None, ..memory }, 3, 1280).unwrap()
    }

    fn parsed(text: &str) -> Result<RingDescriptor, DescriptorError> {
        match text.parse() {
            Ok(ring) => Ok(ring),
            Err(crate::Error::Descriptor(error)) => Err(error),
            Err(other) => panic!("{other}"),
        }
    }

    /// With a fitting checksum.
    fn changed(change: impl FnOnce(&mut Vec<u8>)) -> Result<RingDescriptor, DescriptorError> {
        let mut bytes = example().to_bytes();
        bytes.truncate(bytes.len() - CHECKSUM_BYTES);
        change(&mut bytes);
        let total = (bytes.len() + CHECKSUM_BYTES) as u32;
        bytes[8..12].copy_from_slice(&total.to_le_bytes());
        bytes.extend_from_slice(&crc32fast::hash(&bytes).to_le_bytes());
        RingDescriptor::from_bytes(&bytes)
    }

    #[test]
    fn all_forms_are_read_back() {
        let ring = example();
        assert_eq!(RingDescriptor::from_bytes(&ring.to_bytes()).as_ref(), Ok(&ring));
        let text = ring.to_string();
        assert!(text.starts_with("dipcr."));
        assert_eq!(format!(" {text}\n").parse::<RingDescriptor>().unwrap(), ring);
        let json = serde_json::to_string(&ring).unwrap();
        assert_eq!(serde_json::from_str::<RingDescriptor>(&json).unwrap(), ring);
        assert_eq!(&ring.to_bytes()[..4], b"DIPR");
        let view = serde_json::to_string(&ring.view()).unwrap();
        assert!(view.contains(r#""slots":3,"slot_bytes":1280"#) && !view.contains("token"), "{view}");
        assert_eq!(changed(|bytes| bytes.extend([1, 2, 3])), Ok(ring), "bytes of a later minor version");
    }

    #[test]
    fn what_is_cut_off_damaged_or_something_else_is_refused() {
        let bytes = example().to_bytes();
        for len in 0..bytes.len() {
            assert!(RingDescriptor::from_bytes(&bytes[..len]).is_err(), "{len} bytes");
        }
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(RingDescriptor::from_bytes(&damaged).is_err(), "bit {bit}");
        }
        let export = plain_descriptor();
        assert_eq!(RingDescriptor::from_bytes(&export.to_bytes()), Err(DescriptorError::NotRing));
        assert_eq!(parsed(&export.to_string()), Err(DescriptorError::NotRingText));
        assert!(matches!(Descriptor::from_bytes(&bytes), Err(DescriptorError::BadMagic)));
        let long = vec![0; MAX_RING_BYTES + 1];
        let too_large = Err(DescriptorError::TooLarge { found: long.len() });
        assert_eq!(RingDescriptor::from_bytes(&long), too_large);
        let text = format!("{RING_TEXT_PREFIX}{}", "A".repeat(long.len() * 2));
        assert!(matches!(parsed(&text), Err(DescriptorError::TooLarge { .. })));
    }

    #[test]
    fn senseless_fields_are_refused_though_the_checksum_fits() {
        let slots = |count: u32, each: u64| {
            changed(|bytes| {
                bytes[12..16].copy_from_slice(&count.to_le_bytes());
                bytes[16..24].copy_from_slice(&each.to_le_bytes());
            })
        };
        assert!(slots(16, 256).is_ok());
        for (count, each) in
            [(0, 256), (17, 256), (3, 0), (3, 255), (1, 4352), (1 << 17, 256), (2, u64::MAX), (2, 1 << 63)]
        {
            assert!(matches!(slots(count, each), Err(DescriptorError::BadField { .. })), "{count} of {each}");
        }
        for size in [0_u32, 1, u32::MAX] {
            assert!(changed(|bytes| bytes[24..28].copy_from_slice(&size.to_le_bytes())).is_err(), "{size}");
        }
        let unknown = changed(|bytes| bytes[6] = 1);
        assert_eq!(unknown, Err(DescriptorError::UnknownFeatures { flags: 1 }));
        let version = changed(|bytes| bytes[4] = 2);
        assert!(matches!(version, Err(DescriptorError::Version { what: "ring", .. })));
    }
}
