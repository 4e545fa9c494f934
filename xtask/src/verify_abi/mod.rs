//! `cargo xtask verify-abi`: compares the declarations of ACL with the vendor's headers.
//!
//! The project builds without the vendor's toolkit, and a wrong constant or a missing argument is undefined behaviour on
//! the user's machine. Therefore the checked-in bindings are compared with the bindings that the same bindgen generates
//! from the vendor's headers of two CANN generations. Their license does not permit redistribution, so they are downloaded
//! and stay in the target directory.
//!
//! A self-test then inserts mistakes into our header one by one, and checks that each is detected.

mod compare;
mod required;
mod self_test;
mod wheels;

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::abi::Abi;
use crate::bindgen::{Source, bindings, bindings_path, provide_libclang};
use compare::{ArgumentNames, Class, Difference, compare};

/// One generation of the vendor's interface, restricted to the names that we declare.
struct Generation {
    /// Version of torch-npu.
    wheel: &'static str,
    /// Version of ACL in the headers.
    version: String,
    abi: Abi,
}

pub(crate) fn run() -> Result<()> {
    provide_libclang()?;
    let path = bindings_path();
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let ours = Abi::read(&text).context("cannot parse backend-ascend/src/bindings.rs")?;
    let lists = required::read()?;
    let older = generation(&wheels::OLDER, &ours)?;
    let newer = generation(&wheels::NEWER, &ours)?;
    let with_older = compare(&ours, &older.abi, ArgumentNames::Ignored);
    let with_newer = compare(&ours, &newer.abi, ArgumentNames::Compared);
    print_table([(&older, &with_older), (&newer, &with_newer)]);
    print_absent(&older, &with_older);

    let mut mismatches = mismatches(&older, &with_older, Absent::Allowed);
    mismatches.extend(self::mismatches(&newer, &with_newer, Absent::Error));
    let declared = ours.functions.keys().collect::<Vec<_>>();
    mismatches.extend(required::mismatches(&lists, &declared, &with_older[0].absent));
    if !mismatches.is_empty() {
        eprintln!();
        for mismatch in &mismatches {
            eprintln!("error: {mismatch}");
        }
        bail!(
            "{} declarations of ACL do not match the vendor's headers; correct backend-ascend/include/acl.h",
            mismatches.len()
        );
    }
    let required = lists[required::REQUIRED].len();
    let optional = declared.len() - required;
    println!("required functions: {required}, all in both generations; {optional} functions are optional");
    let mistakes = self_test::run(&newer, &older)?;
    println!("self-test: {mistakes} mistakes in our header and list, all detected");
    Ok(())
}

/// Reads the headers of a generation, restricted to the names that we declare.
fn generation(wheel: &wheels::Wheel, ours: &Abi) -> Result<Generation> {
    let directory = wheels::headers(wheel)?;
    read(directory, names(ours))
        .map(|(version, abi)| Generation { wheel: wheel.version, version, abi })
        .with_context(|| format!("cannot read the headers of torch-npu {}", wheel.version))
}

fn read(directory: PathBuf, mut names: Vec<String>) -> Result<(String, Abi)> {
    names.push("ACL_(MAJOR|MINOR|PATCH)_VERSION".to_owned());
    let abi = Abi::read(&bindings(&Source::Vendor { directory, names })?)?;
    let part =
        |name: &str| abi.constants.get(name).with_context(|| format!("{name} not found in the headers"));
    let version = format!(
        "{}.{}.{}",
        part("ACL_MAJOR_VERSION")?,
        part("ACL_MINOR_VERSION")?,
        part("ACL_PATCH_VERSION")?
    );
    Ok((version, abi))
}

/// Returns the names that we declare; a type stands for its enumeration values.
fn names(abi: &Abi) -> Vec<String> {
    let names = abi.functions.keys().chain(abi.constants.keys()).chain(&abi.types);
    names.cloned().collect()
}

/// Whether a generation may lack a symbol that we declare.
#[derive(Clone, Copy, PartialEq)]
enum Absent {
    /// Permitted: a later generation added it.
    Allowed,
    /// An error: no generation has it.
    Error,
}

fn mismatches(generation: &Generation, classes: &[Class], absent: Absent) -> Vec<String> {
    let Generation { wheel, version, .. } = generation;
    let header = format!("ACL {version} (torch-npu {wheel})");
    let mut mismatches = Vec::new();
    for class in classes {
        for Difference { symbol, ours, theirs } in &class.different {
            let name = class.name;
            mismatches.push(format!(
                "{name}: {symbol} differs from {header}\n      ours:   {ours}\n      theirs: {theirs}"
            ));
        }
        if absent == Absent::Error {
            let missing = class.absent.iter();
            mismatches
                .extend(missing.map(|symbol| format!("{}: {symbol} not found in {header}", class.name)));
        }
    }
    mismatches
}

fn print_table(generations: [(&Generation, &[Class; 4]); 2]) {
    let head =
        |generation: &Generation| format!("ACL {} (torch-npu {})", generation.version, generation.wheel);
    let [(first, first_classes), (second, second_classes)] = generations;
    println!("{:<12}  {:>4}  {:<32}  {}", "", "ours", head(first), head(second));
    for (first, second) in first_classes.iter().zip(second_classes) {
        println!("{:<12}  {:>4}  {:<32}  {}", first.name, first.ours, outcome(first), outcome(second));
    }
}

fn outcome(class: &Class) -> String {
    let equal = class.ours - class.absent.len() - class.different.len();
    let mut outcome = format!("{equal} equal");
    for (count, state) in [(class.absent.len(), "absent"), (class.different.len(), "DIFFERENT")] {
        if count > 0 {
            outcome += &format!(", {count} {state}");
        }
    }
    outcome
}

fn print_absent(generation: &Generation, classes: &[Class; 4]) {
    for class in classes.iter().filter(|class| !class.absent.is_empty()) {
        println!("{} not found in ACL {}: {}", class.name, generation.version, class.absent.join(", "));
    }
}
