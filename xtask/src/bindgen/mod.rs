//! `cargo xtask bindgen`: makes `backend-ascend/src/bindings.rs` out of `backend-ascend/include/acl.h`.
//!
//! The result is checked in, so that nobody who builds the crate needs clang. It is the same on every machine: the
//! target is stated, the C library's headers are our own (`xtask/include`), and bindgen formats it itself.

mod libclang;
mod unused;

use std::fs;
use std::path::{Path, PathBuf};

use ::bindgen::{Builder, EnumVariation, Formatter, RustEdition, RustTarget};
use anyhow::{Context, Result, bail, ensure};

use crate::verify_abi::Abi;
use crate::workspace::root;

pub(crate) use libclang::provide as provide_libclang;

/// For which machines the bindings are made. What comes out has to be the same: one file serves both.
const TARGETS: [&str; 2] = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"];

/// The second number of the workspace's rust-version, which begins with 1.
const RUST_MINOR: u64 = 88;

/// What stands above the bindings.
const HEAD: &str = r#"// Made by `cargo xtask bindgen` from include/acl.h: do not edit.

#![allow(
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    dead_code,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    unreachable_pub,
    reason = "generated; the names are the vendor's, and the table of functions has parts that nobody calls"
)]
"#;

/// Make the bindings of ACL out of our header. Fetches libclang from PyPI where the machine has none.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Change nothing, and fail where the bindings are out of date.
    #[arg(long)]
    check: bool,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    provide_libclang()?;
    let made = bindings(&Source::File(header()))?;
    let path = bindings_path();
    if options.check {
        let found = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        check(&made, &found)?;
        check_use(&made)?;
        println!("backend-ascend/src/bindings.rs is what include/acl.h says, and all of it is used");
        return Ok(());
    }
    fs::write(&path, &made).with_context(|| format!("writing {}", path.display()))?;
    println!("wrote backend-ascend/src/bindings.rs, {} lines", made.lines().count());
    Ok(())
}

/// Our header.
pub(crate) fn header() -> PathBuf {
    root().join("backend-ascend/include/acl.h")
}

/// The bindings that are checked in.
pub(crate) fn bindings_path() -> PathBuf {
    root().join("backend-ascend/src/bindings.rs")
}

/// What bindings are made of.
pub(crate) enum Source {
    /// All of a header.
    File(PathBuf),
    /// All of a header whose text is not in a file.
    Text(String),
    /// Of the vendor's headers in a folder, some names (regular expressions).
    Vendor { folder: PathBuf, names: Vec<String> },
}

/// The bindings of a source, for all targets.
///
/// # Errors
///
/// Where clang finds a mistake, and where the targets differ.
pub(crate) fn bindings(source: &Source) -> Result<String> {
    let [first, second] = TARGETS.map(|target| generate(source, target));
    let (first, second) = (first?, second?);
    ensure!(
        first == second,
        "the bindings for {} and {} differ, and one file has to serve both: {}",
        TARGETS[0],
        TARGETS[1],
        first_difference(&first, &second)
    );
    Ok(format!("{HEAD}\n{first}"))
}

fn generate(source: &Source, target: &str) -> Result<String> {
    let include = root().join("xtask/include");
    let builder = Builder::default()
        .clang_args(["-x", "c", "-std=c11", "-nostdinc", "-target", target])
        .clang_args(["-isystem", text(&include)?])
        .dynamic_library_name("Acl")
        .dynamic_link_require_all(false)
        // A number that our header does not know is then a number, not undefined behaviour.
        .default_enum_style(EnumVariation::NewType { is_bitfield: false, is_global: false })
        .new_type_alias("aclrt(Stream|Event|Context|DrvMemHandle)")
        .derive_eq(true)
        .use_core()
        .wrap_unsafe_ops(true)
        .rust_edition(RustEdition::Edition2024)
        .rust_target(RustTarget::stable(RUST_MINOR, 0).ok().context("bindgen knows no such Rust")?)
        .disable_header_comment()
        .formatter(Formatter::Prettyplease);
    let builder = match source {
        Source::File(header) => allow(builder.header(text(header)?), &["acl.*".into(), "ACL_.*".into()]),
        Source::Text(header) => {
            allow(builder.header_contents("acl.h", header), &["acl.*".into(), "ACL_.*".into()])
        }
        Source::Vendor { folder, names } => {
            let builder = builder
                // The older headers state the length of an array in C++, or in a C newer than clang's.
                .clang_arg("-Dconstexpr=const")
                .clang_args(["-I", text(folder)?, "-I", text(&folder.join("acl"))?])
                .header_contents("vendor.h", "#include \"acl/acl.h\"\n");
            allow(builder, names)
        }
    };
    builder.generate().map(|bindings| bindings.to_string()).context("bindgen")
}

fn allow(builder: Builder, names: &[String]) -> Builder {
    names.iter().fold(builder, |builder, name| {
        builder.allowlist_function(name).allowlist_type(name).allowlist_var(name)
    })
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("clang takes no path that is not UTF-8: {}", path.display()))
}

fn check(made: &str, found: &str) -> Result<()> {
    if made != found {
        bail!(
            "backend-ascend/src/bindings.rs is out of date ({}); run `cargo xtask bindgen`, and commit the result",
            first_difference(made, found)
        );
    }
    Ok(())
}

fn check_use(made: &str) -> Result<()> {
    let abi = Abi::read(made)?;
    let functions = abi.functions.into_keys().collect::<Vec<_>>();
    let constants = abi.constants.into_keys().collect::<Vec<_>>();
    let unused = unused::unused(&functions, &constants)?;
    ensure!(
        unused.is_empty(),
        "backend-ascend/include/acl.h declares what nothing in backend-ascend/src uses: {}; take it out, and run \
         `cargo xtask bindgen`",
        unused.join(", ")
    );
    Ok(())
}

/// The first line in which two texts differ, as words.
fn first_difference(new: &str, old: &str) -> String {
    let (mut new_lines, mut old_lines) = (new.lines(), old.lines());
    let mut number = 1;
    loop {
        match (new_lines.next(), old_lines.next()) {
            (None, None) => return "in how the last line ends".to_owned(),
            (new, old) if new == old => number += 1,
            (new, old) => {
                let shown = |line: Option<&str>| {
                    line.map_or("the end".to_owned(), |line| format!("{:?}", line.trim()))
                };
                return format!("line {number}: {} and {}", shown(new), shown(old));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bindings_that_are_out_of_date_are_an_error_that_says_what_to_run() {
        check("one\ntwo\n", "one\ntwo\n").unwrap();
        let error = check("one\ntwo\n", "one\nthree\n").unwrap_err().to_string();
        assert!(error.contains("line 2: \"two\" and \"three\""), "{error}");
        assert!(error.contains("cargo xtask bindgen"), "{error}");
        let error = check("one\ntwo\n", "one\n").unwrap_err().to_string();
        assert!(error.contains("line 2: \"two\" and the end"), "{error}");
        assert!(check("one\n", "one").is_err());
    }

    #[test]
    fn the_bindings_are_for_the_rust_version_of_the_workspace() {
        assert_eq!(env!("CARGO_PKG_RUST_VERSION"), format!("1.{RUST_MINOR}"));
    }
}
