//! A minimal ELF reader that finds the names of dynamic symbols.
//!
//! The fields are those of [elf(5)](https://man7.org/linux/man-pages/man5/elf.5.html), for 64 bits.

use std::io;

const SECTION_IS_DYNAMIC_SYMBOLS: u32 = 11;
const SYMBOL_BYTES: usize = 24;

/// The bytes of a shared library, with its table of dynamic symbols.
pub(crate) struct Elf<'a> {
    bytes: &'a [u8],
    symbols: std::ops::Range<usize>,
    strings: &'a [u8],
}

/// A dynamic symbol.
pub(crate) struct Symbol<'a> {
    pub(crate) name: &'a [u8],
    /// Offset in the file of the symbol's name index, 4 bytes.
    pub(crate) name_at: usize,
}

impl<'a> Elf<'a> {
    pub(crate) fn parse(bytes: &'a [u8]) -> io::Result<Self> {
        Self::sections(bytes).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "no shared library of 64 bits, little endian, with symbols",
            )
        })
    }

    fn sections(bytes: &'a [u8]) -> Option<Self> {
        let is_elf = bytes.get(..6)? == [0x7f, b'E', b'L', b'F', 2, 1];
        let table = usize::try_from(u64_at(bytes, 0x28)?).ok().filter(|_| is_elf)?;
        let (entry, count) = (usize::from(u16_at(bytes, 0x3a)?), usize::from(u16_at(bytes, 0x3c)?));
        let section = |index: usize| bytes.get(table.checked_add(index.checked_mul(entry)?)?..);
        let found = (0..count)
            .filter_map(section)
            .find(|section| u32_at(section, 4) == Some(SECTION_IS_DYNAMIC_SYMBOLS))?;
        let strings = section(usize::try_from(u32_at(found, 0x28)?).ok()?)?;
        let range = |section: &[u8]| {
            let start = usize::try_from(u64_at(section, 0x18)?).ok()?;
            let len = usize::try_from(u64_at(section, 0x20)?).ok()?;
            let range = start..start.checked_add(len)?;
            (range.end <= bytes.len()).then_some(range)
        };
        Some(Self { bytes, symbols: range(found)?, strings: &bytes[range(strings)?] })
    }

    /// Iterates over the symbols that the library defines.
    pub(crate) fn defined(&self) -> impl Iterator<Item = Symbol<'a>> + '_ {
        self.symbols.clone().step_by(SYMBOL_BYTES).filter_map(|at| {
            let symbol = self.bytes.get(at..at + SYMBOL_BYTES)?;
            let tail = self.strings.get(usize::try_from(u32_at(symbol, 0)?).ok()?..)?;
            let name = &tail[..tail.iter().position(|&byte| byte == 0)?];
            let is_defined = u16_at(symbol, 6)? != 0 && !name.is_empty();
            is_defined.then_some(Symbol { name, name_at: at })
        })
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}
