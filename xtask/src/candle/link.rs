//! Stub libraries for linking without the CUDA libraries: their names and symbols with empty functions.
//!
//! The CUDA toolkit contains such a stub of libcuda (`lib64/stubs`). The other libraries have hundreds of MiB and are installed
//! on the machine that runs the program; the linker only requires their symbols, which are taken from cudarc's sources.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::workspace::run;

/// Linker name, module in cudarc, and soname of CUDA 13.
const LIBRARIES: [(&str, &str, &str); 5] = [
    ("cuda", "driver", "libcuda.so.1"),
    ("cublas", "cublas", "libcublas.so.13"),
    ("cublasLt", "cublaslt", "libcublasLt.so.13"),
    ("curand", "curand", "libcurand.so.10"),
    ("nvrtc", "nvrtc", "libnvrtc.so.13"),
];

/// Creates the libraries in the toolkit's `lib/stubs`, which cudarc adds to the search path of the linker.
pub(super) fn libraries(cudarc: &Path, toolkit: &Path) -> Result<()> {
    let directory = toolkit.join("lib/stubs");
    fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
    for (name, module, soname) in LIBRARIES {
        let library = directory.join(format!("lib{name}.so"));
        if library.exists() {
            continue;
        }
        let bindings = cudarc.join(module).join("sys/mod.rs");
        let bindings = fs::read_to_string(&bindings).with_context(|| {
            format!("cudarc's sources have another layout: cannot read {}", bindings.display())
        })?;
        let functions = functions(&bindings);
        ensure!(!functions.is_empty(), "no functions of {name} found in cudarc's sources");
        let source = directory.join(format!("{name}.c"));
        let text: String = functions.iter().map(|function| format!("void {function}(void) {{}}\n")).collect();
        fs::write(&source, text)?;
        let mut compiler = Command::new(env::var_os("CC").unwrap_or_else(|| "cc".into()));
        compiler
            .args(["-shared", "-fPIC", "-w", &format!("-Wl,-soname,{soname}"), "-o"])
            .arg(&library)
            .arg(&source);
        run(&mut compiler)?;
    }
    Ok(())
}

/// Returns the vendor's functions in bindings, such as `fn cuMemAlloc_v2(`.
fn functions(bindings: &str) -> BTreeSet<&str> {
    let name = |after: &'_ str| after.find(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    bindings
        .match_indices("fn ")
        .filter_map(|(at, word)| {
            let rest = &bindings[at + word.len()..];
            let end = name(rest)?;
            let is_function = rest[end..].trim_start().starts_with('(');
            (is_function && (rest.starts_with("cu") || rest.starts_with("nvrtc"))).then_some(&rest[..end])
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vendor_functions_are_found_in_bindings() {
        let bindings = "
            pub unsafe fn cuInit(Flags: ::core::ffi::c_uint) -> CUresult {
                type _F = unsafe extern \"C\" fn(::core::ffi::c_uint) -> CUresult;
                extern \"C\" { fn cuInit(Flags: ::core::ffi::c_uint) -> CUresult; }
            }
            pub unsafe fn cuMemFree_v2 (dptr: CUdeviceptr) -> CUresult;
            pub unsafe fn culib() -> &'static Library { get::<fn nothing>() }
            fn load_fn() {}";
        let found: Vec<_> = functions(bindings).into_iter().collect();
        assert_eq!(found, ["cuInit", "cuMemFree_v2", "culib"]);
    }
}
