//! Libraries to link with where CUDA's are not: the right names and symbols, and nothing behind them.
//!
//! The CUDA toolkit brings such libraries for libcuda (`lib64/stubs`). The others, hundreds of MiB, have the machine that
//! runs the program; here the linker only has to know which library has which function. cudarc's sources tell.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::workspace::run;

/// The name for the linker, cudarc's module, and the name for the machine that runs the program, of CUDA 13.
const LIBRARIES: [(&str, &str, &str); 5] = [
    ("cuda", "driver", "libcuda.so.1"),
    ("cublas", "cublas", "libcublas.so.13"),
    ("cublasLt", "cublaslt", "libcublasLt.so.13"),
    ("curand", "curand", "libcurand.so.10"),
    ("nvrtc", "nvrtc", "libnvrtc.so.13"),
];

/// Makes the libraries in the toolkit's `lib/stubs`, where cudarc has the linker look.
pub(super) fn libraries(cudarc: &Path, toolkit: &Path) -> Result<()> {
    let folder = toolkit.join("lib/stubs");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    for (name, module, soname) in LIBRARIES {
        let library = folder.join(format!("lib{name}.so"));
        if library.exists() {
            continue;
        }
        let bindings = cudarc.join(module).join("sys/mod.rs");
        let bindings = fs::read_to_string(&bindings)
            .with_context(|| format!("cudarc's sources are arranged otherwise: {}", bindings.display()))?;
        let functions = functions(&bindings);
        ensure!(!functions.is_empty(), "no functions of {name} in cudarc's sources");
        let source = folder.join(format!("{name}.c"));
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

/// The vendor's functions that are declared in bindings: `fn cuMemAlloc_v2(`.
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
    fn functions_of_the_vendor_are_found_in_bindings() {
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
