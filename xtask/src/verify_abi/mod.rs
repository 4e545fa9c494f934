//! `cargo xtask verify-abi`: does what we declare of ACL agree with the vendor's headers?
//!
//! Nobody here has the vendor's toolkit, and a wrong number or an argument too few is undefined behaviour on a machine
//! that we do not see. So the checked-in bindings are compared with what the same bindgen makes of the real headers, of
//! two CANN generations. Those headers are not ours to give away: they are fetched, and stay in the target folder.
//!
//! Then it tries itself: mistakes are put into our header one by one, and each has to be found.

mod abi;
mod compare;
mod required;
mod self_test;
mod wheels;

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::bindgen::{Source, bindings, bindings_path, provide_libclang};
pub(crate) use abi::Abi;
use compare::{ArgumentNames, Class, Difference, compare};

/// The vendor's interface, as far as it is of interest here.
struct Generation {
    /// The version of torch-npu.
    wheel: &'static str,
    /// The version of ACL that the headers state.
    version: String,
    abi: Abi,
}

pub(crate) fn run() -> Result<()> {
    provide_libclang()?;
    let path = bindings_path();
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let ours = Abi::read(&text).context("backend-ascend/src/bindings.rs")?;
    let lists = required::read()?;
    let older = generation(&wheels::OLDER, &ours)?;
    let newer = generation(&wheels::NEWER, &ours)?;
    let with_older = compare(&ours, &older.abi, ArgumentNames::Ignored);
    let with_newer = compare(&ours, &newer.abi, ArgumentNames::Count);
    print_table([(&older, &with_older), (&newer, &with_newer)]);
    print_absent(&older, &with_older);

    let mut complaints = complaints(&older, &with_older, Absent::Allowed);
    complaints.extend(self::complaints(&newer, &with_newer, Absent::Refused));
    let declared = ours.functions.keys().collect::<Vec<_>>();
    complaints.extend(required::complaints(&lists, &declared, &with_older[0].absent));
    if !complaints.is_empty() {
        eprintln!();
        for complaint in &complaints {
            eprintln!("wrong: {complaint}");
        }
        bail!("{} of our declarations of ACL are wrong; see backend-ascend/include/acl.h", complaints.len());
    }
    let required = lists[required::REQUIRED].len();
    let optional = declared.len() - required;
    println!("required functions: {required}, all in both; the other {optional} are optional");
    let tried = self_test::run(&newer, &older)?;
    println!("tried with {tried} mistakes in our header and our list: each was found");
    Ok(())
}

/// Reads a generation's headers: what we have, by its name there, and the headers' own version.
fn generation(wheel: &wheels::Wheel, ours: &Abi) -> Result<Generation> {
    let folder = wheels::headers(wheel)?;
    read(folder, names(ours))
        .map(|(version, abi)| Generation { wheel: wheel.version, version, abi })
        .with_context(|| format!("the headers of torch-npu {}", wheel.version))
}

fn read(folder: PathBuf, mut names: Vec<String>) -> Result<(String, Abi)> {
    names.push("ACL_(MAJOR|MINOR|PATCH)_VERSION".to_owned());
    let abi = Abi::read(&bindings(&Source::Vendor { folder, names })?)?;
    let part = |name: &str| abi.constants.get(name).with_context(|| format!("they state no {name}"));
    let version = format!(
        "{}.{}.{}",
        part("ACL_MAJOR_VERSION")?,
        part("ACL_MINOR_VERSION")?,
        part("ACL_PATCH_VERSION")?
    );
    Ok((version, abi))
}

/// The names of all that we declare, values of enumerations by their types.
fn names(abi: &Abi) -> Vec<String> {
    let names = abi.functions.keys().chain(abi.constants.keys()).chain(&abi.types);
    names.cloned().collect()
}

/// What it means that a generation lacks something of ours.
#[derive(Clone, Copy, PartialEq)]
enum Absent {
    /// It came later.
    Allowed,
    /// Nobody has it.
    Refused,
}

fn complaints(generation: &Generation, classes: &[Class], absent: Absent) -> Vec<String> {
    let Generation { wheel, version, .. } = generation;
    let header = format!("ACL {version} (torch-npu {wheel})");
    let mut complaints = Vec::new();
    for class in classes {
        for Difference { symbol, ours, theirs } in &class.different {
            let name = class.name;
            complaints.push(format!(
                "{name}: {symbol} is not as in {header}\n      ours:   {ours}\n      theirs: {theirs}"
            ));
        }
        if absent == Absent::Refused {
            let missing = class.absent.iter();
            complaints.extend(missing.map(|symbol| format!("{}: {header} has no {symbol}", class.name)));
        }
    }
    complaints
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
    let alike = class.ours - class.absent.len() - class.different.len();
    let mut outcome = format!("{alike} alike");
    for (count, what) in [(class.absent.len(), "absent"), (class.different.len(), "DIFFERENT")] {
        if count > 0 {
            outcome += &format!(", {count} {what}");
        }
    }
    outcome
}

fn print_absent(generation: &Generation, classes: &[Class; 4]) {
    for class in classes.iter().filter(|class| !class.absent.is_empty()) {
        println!("{} that ACL {} lacks: {}", class.name, generation.version, class.absent.join(", "));
    }
}
