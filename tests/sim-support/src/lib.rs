//! Support for the simulators of vendors' libraries.
//!
//! An older driver is one whose library lacks symbols. To simulate it, the library is copied, and names are removed
//! from the symbol table of the copy.
#![forbid(unsafe_code)]

mod elf;

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};

use elf::Elf;

/// Writes a copy of a shared library to `out` in which `dlsym` and the linker do not find these dynamic symbols.
/// Calls inside the library still work.
///
/// # Errors
///
/// `InvalidData` for a file that is not a shared library of this machine (64 bits, little endian), `NotFound` for a
/// name that the library does not define, and errors of reading and writing.
pub fn hide_symbols(library: &Path, names: &[&str], out: &Path) -> io::Result<()> {
    let mut bytes = std::fs::read(library)?;
    let slots = {
        let elf = Elf::parse(&bytes)?;
        let find = |name: &&str| {
            let found = elf.defined().find(|symbol| symbol.name == name.as_bytes());
            found.map(|symbol| symbol.name_at).ok_or_else(|| {
                let text = format!("{} defines no symbol {name}", library.display());
                io::Error::new(io::ErrorKind::NotFound, text)
            })
        };
        names.iter().map(find).collect::<io::Result<Vec<usize>>>()?
    };
    for slot in slots {
        // String 0 of every string table is the empty one.
        bytes[slot..slot + 4].fill(0);
    }
    // Written to a new file, because a process may have the old one mapped.
    let unfinished = unfinished_name(out);
    std::fs::write(&unfinished, bytes)?;
    std::fs::rename(&unfinished, out)
}

/// Returns a unique path beside `path`, for a file that is renamed to `path` when it is complete. Concurrent
/// writers thus never see an incomplete file. The name is random, because containers that share a checkout have equal
/// process ids.
pub fn unfinished_name(path: &Path) -> PathBuf {
    path.with_extension(format!("{:016x}.unfinished", RandomState::new().hash_one(0)))
}

/// Returns the sorted names of the dynamic symbols that a shared library defines.
///
/// # Errors
///
/// As [`hide_symbols`].
pub fn defined_symbols(library: &Path) -> io::Result<Vec<String>> {
    let bytes = std::fs::read(library)?;
    let elf = Elf::parse(&bytes)?;
    let name = |symbol: elf::Symbol<'_>| String::from_utf8_lossy(symbol.name).into_owned();
    let mut names: Vec<String> = elf.defined().map(name).collect();
    names.sort();
    Ok(names)
}

/// Returns the path of the shared library that Cargo built for the running test or program: beside the program, or
/// in `deps/`.
///
/// # Errors
///
/// `NotFound` with the searched paths.
pub fn built_library(file_name: &str) -> io::Result<PathBuf> {
    let program = std::env::current_exe()?;
    let folders = program.ancestors().skip(1).take(2);
    let places: Vec<PathBuf> =
        folders.flat_map(|folder| [folder.join(file_name), folder.join("deps").join(file_name)]).collect();
    places.iter().find(|place| place.is_file()).cloned().ok_or_else(|| {
        let text = format!("{file_name} was not built; looked for {places:?}");
        io::Error::new(io::ErrorKind::NotFound, text)
    })
}
