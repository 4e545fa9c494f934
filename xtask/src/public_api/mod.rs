//! `cargo xtask public-api`: the public API of the published crates changes only on purpose.
//!
//! `docs/spec/public-api` holds one list per published library: its modules, re-exports, items, fields, variants, methods with
//! their signatures, trait implementations, and whether types are `Send` and `Sync`. The chore compares the lists with the
//! pages that rustdoc writes with all features, and fails on each difference; `--update` writes the lists.
//!
//! rustdoc's JSON would state the same, but is unstable and changes its version every few weeks; its pages come from any stable
//! toolchain. Items that are hidden from the documentation are not part of the API.

mod pages;
#[cfg(test)]
mod remedies;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::Value;

use crate::workspace::{cargo, metadata, packages, root, run as run_command, target_directory};

/// Compare the public API of the published crates with the lists in docs/spec/public-api
#[derive(Args)]
pub(crate) struct Options {
    /// Write the lists
    #[arg(long)]
    update: bool,
}

/// The directory of the lists, relative to the root of the workspace.
const LISTS: &str = "docs/spec/public-api";

/// A published package with a library.
struct Library {
    package: String,
    /// The name of the library in paths.
    name: String,
    /// The packages that it depends on.
    dependencies: Vec<String>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let libraries = published_libraries(packages(&metadata(&["--no-deps"])?)?);
    let documented = document(&libraries)?;
    let lists = root().join(LISTS);
    if options.update {
        return write(&lists, &libraries, &documented);
    }
    let mut differences = Vec::new();
    for library in &libraries {
        let file = lists.join(format!("{}.txt", library.package));
        // A missing list is an empty one, so that the message states what to do.
        let listed = fs::read_to_string(&file).unwrap_or_default().lines().map(str::to_owned).collect();
        let public = pages::public_items(&documented.join(&library.name))?;
        differences.extend(compare(&library.package, &listed, &public));
    }
    if !differences.is_empty() {
        bail!("{}", report(&differences));
    }
    eprintln!("  the public API of {} crates is that of {LISTS}", libraries.len());
    Ok(())
}

fn write(lists: &Path, libraries: &[Library], documented: &Path) -> Result<()> {
    fs::create_dir_all(lists).with_context(|| format!("cannot create {}", lists.display()))?;
    for file in fs::read_dir(lists)? {
        // Lists of packages that are no longer published, too.
        fs::remove_file(file?.path())?;
    }
    for library in libraries {
        let file = lists.join(format!("{}.txt", library.package));
        let mut text = String::new();
        for line in pages::public_items(&documented.join(&library.name))? {
            text.push_str(&line);
            text.push('\n');
        }
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    eprintln!("  wrote the public API of {} crates to {LISTS}", libraries.len());
    Ok(())
}

/// Returns the packages of `cargo metadata` that are published and have a library.
fn published_libraries(packages: &[Value]) -> Vec<Library> {
    let published = packages.iter().filter(|package| package["publish"].is_null());
    let libraries = published.filter_map(|package| {
        let targets = package["targets"].as_array()?;
        let is_library = |target: &&Value| {
            target["kind"].as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == "lib"))
        };
        let library = targets.iter().find(is_library)?;
        let name = library["name"].as_str()?.replace('-', "_");
        // Those of tests have another kind, and can be circular.
        let needed = package["dependencies"].as_array().into_iter().flatten();
        let needed = needed.filter(|needed| needed["kind"].is_null());
        let dependencies = needed.filter_map(|needed| Some(needed["name"].as_str()?.to_owned())).collect();
        Some(Library { package: package["name"].as_str()?.to_owned(), name, dependencies })
    });
    libraries.collect()
}

/// Documents the libraries with all features; returns the directory that contains a directory of pages for each.
fn document(libraries: &[Library]) -> Result<PathBuf> {
    // The pages are in a directory of their own: `cargo doc` with other features would replace them. Cargo keeps compiled
    // dependencies in the common directory (since 1.91; earlier, they are compiled once more).
    let directory = target_directory().join("public-api");
    let mut left: Vec<_> = libraries.iter().collect();
    // rustdoc links an item of another library only if that has been documented, and Cargo does not wait for it.
    while !left.is_empty() {
        let is_left = |package: &String| left.iter().any(|library| library.package == *package);
        let (later, now): (Vec<_>, Vec<_>) =
            left.iter().copied().partition(|library| library.dependencies.iter().any(is_left));
        if now.is_empty() {
            bail!("the libraries depend on each other in a circle");
        }
        let mut command = cargo(["doc", "--quiet", "--no-deps", "--lib", "--all-features"]);
        for library in now {
            command.args(["-p", &library.package]);
        }
        command.arg("--target-dir").arg(&directory).env("CARGO_BUILD_BUILD_DIR", target_directory());
        // The version also distinguishes these pages from those of other calls of Cargo, so that Cargo writes them although it has
        // written others.
        command.env("RUSTDOCFLAGS", "-D warnings --crate-version public-api");
        run_command(&mut command)?;
        left = later;
    }
    Ok(directory.join("doc"))
}

/// Returns the path that a line is about.
fn path(line: &str) -> &str {
    line.split_once(": ").map_or(line, |(path, _)| path)
}

/// Returns the differences of one package, as lines that begin with `-` (no longer public) or `+` (public, and not listed).
fn compare(package: &str, listed: &BTreeSet<String>, public: &BTreeSet<String>) -> Vec<String> {
    let removed = listed.difference(public).map(|line| (line, '-'));
    let added = public.difference(listed).map(|line| (line, '+'));
    let mut changed: Vec<_> = removed.chain(added).collect();
    changed.sort_by_key(|(line, sign)| (path(line), *sign == '+'));
    changed.into_iter().map(|(line, sign)| format!("{sign} {package} {line}")).collect()
}

fn report(differences: &[String]) -> String {
    format!(
        "the public API differs from {LISTS} (- only there, + only in the code):\n{}\n\
         if the change is intended, run `cargo xtask public-api --update`, commit the lists, and describe the change in \
         CHANGELOG.md; a line that only the notation of another rustdoc has changed needs the update alone",
        differences.join("\n")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn set(lines: &[&str]) -> BTreeSet<String> {
        lines.iter().map(|line| (*line).to_owned()).collect()
    }

    #[test]
    fn changed_signature_is_reported_with_both_forms() {
        let listed = set(&["A::f: pub fn f(&self, x: u8)", "A: pub struct A", "B: pub struct B"]);
        let public = set(&["A::f: pub fn f(&self, x: u16)", "A: pub struct A", "B: pub struct B"]);
        let differences = compare("device-ipc", &listed, &public);
        assert_eq!(
            differences,
            ["- device-ipc A::f: pub fn f(&self, x: u8)", "+ device-ipc A::f: pub fn f(&self, x: u16)"]
        );
        let report = report(&differences);
        assert!(report.contains("cargo xtask public-api --update") && report.contains("x: u16"), "{report}");
    }

    #[test]
    fn removed_and_new_items_are_reported() {
        let (one, both) = (set(&["A: pub struct A"]), set(&["A: pub struct A", "B: pub struct B"]));
        assert_eq!(compare("p", &both, &one), ["- p B: pub struct B"]);
        assert_eq!(compare("p", &one, &both), ["+ p B: pub struct B"]);
        assert!(compare("p", &one, &one).is_empty());
    }

    /// The packages that a text names as arguments of Cargo: `-p NAME`.
    fn arguments(text: &str) -> BTreeSet<&str> {
        text.split("-p ").skip(1).filter_map(|rest| rest.split_whitespace().next()).collect()
    }

    #[test]
    fn every_published_package_is_packaged_and_released() {
        let metadata = metadata(&["--no-deps"]).unwrap();
        let packages = packages(&metadata).unwrap();
        let published = packages.iter().filter(|package| package["publish"].is_null());
        let published: BTreeSet<_> = published.filter_map(|package| package["name"].as_str()).collect();
        for file in [".ci/packages", "RELEASING.md"] {
            let text = fs::read_to_string(root().join(file)).unwrap();
            assert_eq!(arguments(&text), published, "{file}");
        }
    }

    #[test]
    fn libraries_that_are_published_are_listed() {
        let target = |kind: &str| json!({ "kind": [kind], "name": "a-b" });
        let packages = [
            json!({ "name": "published", "publish": null, "targets": [target("bin"), target("lib")] }),
            json!({ "name": "private", "publish": [], "targets": [target("lib")] }),
            json!({ "name": "program", "publish": null, "targets": [target("bin")] }),
        ];
        let libraries = published_libraries(&packages);
        assert_eq!(libraries.len(), 1);
        assert_eq!((libraries[0].package.as_str(), libraries[0].name.as_str()), ("published", "a_b"));
    }
}
