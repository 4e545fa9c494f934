//! What the simulators of vendors' libraries have in common.
//!
//! Why: an older driver is one whose library lacks symbols, and `dlsym` cannot be taught to pretend. What can
//! be done is to copy the library and take names out of the copy's table of symbols.
#![forbid(unsafe_code)]

mod elf;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use elf::Elf;

/// Writes a copy of a shared library to `out` whose dynamic symbols no longer have these names: `dlsym` and the
/// linker do not find them. All else stays, also what the library calls inside itself.
///
/// # Errors
///
/// `InvalidData` for a file that is no shared library of this machine (64 bits, little endian), `NotFound` for a
/// name that it does not define, and whatever reading and writing gives.
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
        // String 0 of every table of strings is the empty one.
        bytes[slot..slot + 4].fill(0);
    }
    // A new file, not new bytes in the old one: a process may have that mapped.
    let unfinished = unfinished_name(out);
    std::fs::write(&unfinished, bytes)?;
    std::fs::rename(&unfinished, out)
}

/// A name beside `path` that nobody else uses: to make something there, and then rename it to `path`, so that others
/// who do the same at the same time always find a whole one.
pub fn unfinished_name(path: &Path) -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    path.with_extension(format!("{}-{count}.unfinished", std::process::id()))
}

/// The names of the dynamic symbols that a shared library defines, sorted.
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

/// Where Cargo put the shared library of a package that the running test or program depends on: beside
/// it, or under `deps/`.
///
/// # Errors
///
/// `NotFound`, naming the places.
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
