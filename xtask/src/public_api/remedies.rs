//! Texts that name an item of the public API name one that exists.
//!
//! An error's remedy is worth nothing if the method that it names has another name by now. This test reads the texts in the
//! code of the library and the program, and the pages for users, and looks up each `Type::member` and `device_ipc::path` in
//! the lists. Links in the documentation of items need no check here: rustdoc resolves them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use proc_macro2::{TokenStream, TokenTree};

use super::{LISTS, path};
use crate::layers::{is_tests, rust_files, skipped};
use crate::workspace::root;

/// The crates whose texts and README users read: folder, name of the list, and the path of the list's items behind `device_ipc::`.
const CRATES: [(&str, &str, &str); 8] = [
    ("", "device-ipc", ""),
    ("ipc-core", "device-ipc-core", ""),
    ("backend-ascend", "device-ipc-ascend", "ascend::"),
    ("backend-cuda", "device-ipc-cuda", "cuda::"),
    ("backend-mock", "device-ipc-mock", "mock::"),
    ("backend-mock/engine", "device-ipc-mock-engine", "mock::engine::"),
    ("engine-nixl", "device-ipc-nixl", "nixl::"),
    ("tcp", "device-ipc-tcp", ""),
];

/// The program, whose texts users read too.
const PROGRAM: &str = "cli";

/// Generated code, whose texts are assertions about the layout of the vendor's types.
const GENERATED: [&str; 1] = ["backend-ascend/src/bindings.rs"];

/// Further pages for users, files or folders.
const PAGES: [&str; 3] = ["docs/guide", "docs/glossary.md", "docs/spec"];

/// Returns the folders of the crates and of the program.
fn folders() -> impl Iterator<Item = PathBuf> {
    CRATES.iter().map(|(folder, ..)| *folder).chain([PROGRAM]).map(|folder| root().join(folder))
}

/// Types of other crates that texts name.
const FOREIGN: [&str; 2] = ["CudaContext", "Device"];

/// Returns the list of a package.
fn list(package: &str) -> String {
    let file = root().join(LISTS).join(format!("{package}.txt"));
    fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// The public paths, as users write them behind `device_ipc::`.
struct Public(BTreeSet<String>);

impl Public {
    fn read() -> Self {
        let mut paths = BTreeSet::new();
        for (_, package, module) in CRATES {
            paths.extend(list(package).lines().map(|line| format!("{module}{}", path(line))));
        }
        Self(paths)
    }

    /// Returns whether a path without `device_ipc::` is public, or a type with this member.
    fn has(&self, path: &str) -> bool {
        self.0.contains(path) || self.0.iter().any(|public| ends_with_path(public, path))
    }
}

fn ends_with_path(path: &str, end: &str) -> bool {
    path.strip_suffix(end).is_some_and(|before| before.ends_with("::"))
}

/// Returns the paths in a text that may be items of this library.
fn paths(text: &str) -> impl Iterator<Item = &str> {
    let is_path = |character: char| character.is_ascii_alphanumeric() || character == '_' || character == ':';
    let words = text.split(move |character: char| !is_path(character)).map(|word| word.trim_matches(':'));
    words.filter(|word| {
        let first = word.split("::").next().unwrap_or_default();
        word.contains("::")
            && (first == "device_ipc" || first.starts_with(|first: char| first.is_ascii_uppercase()))
    })
}

/// Returns whether a path names an item that is not public.
fn is_missing(path: &str, public: &Public) -> bool {
    match path.split_once("::") {
        Some(("device_ipc", path)) => !public.has(path),
        Some((first, _)) => !FOREIGN.contains(&first) && !public.has(path),
        None => false,
    }
}

/// Collects the texts of code that is compiled without `test`, with their lines; not the documentation.
fn texts(tokens: TokenStream, found: &mut Vec<(usize, String)>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut at = 0;
    while at < tokens.len() {
        if let Some(behind) = skipped(&tokens, at) {
            at = behind;
            continue;
        }
        match &tokens[at] {
            TokenTree::Group(group) if !is_documentation(group) => texts(group.stream(), found),
            TokenTree::Literal(literal) => {
                let text = literal.to_string();
                if text.starts_with(['"', 'r']) {
                    found.push((literal.span().start().line, text));
                }
            }
            _ => {}
        }
        at += 1;
    }
}

/// Returns whether a group is that of `#[doc = …]`, or of `serde(… = "path")`, which names functions for the compiler.
fn is_documentation(group: &proc_macro2::Group) -> bool {
    let first = group.stream().into_iter().next();
    matches!(first, Some(TokenTree::Ident(word)) if word == "doc" || word == "serde")
}

/// Returns the targets of log events, which look like paths.
fn log_targets(texts: &[Text]) -> BTreeSet<&str> {
    let whole = texts.iter().map(|text| text.text.trim_matches('"'));
    whole.filter(|text| text.starts_with("device_ipc::") && paths(text).eq([*text])).collect()
}

/// Collects the pages at a place, a file or a folder.
fn pages(place: &Path, found: &mut Vec<PathBuf>) {
    if place.is_dir() {
        for entry in fs::read_dir(place).unwrap() {
            pages(&entry.unwrap().path(), found);
        }
    } else if place.extension().is_some_and(|extension| extension == "md") {
        found.push(place.to_owned());
    }
}

/// A text in the code.
struct Text {
    file: String,
    line: usize,
    text: String,
}

fn all_texts() -> Vec<Text> {
    let mut all = Vec::new();
    for folder in folders() {
        let mut files = Vec::new();
        rust_files(&folder.join("src"), &mut files).unwrap();
        files.sort();
        for path in files {
            let file = path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned();
            if is_tests(&file) || GENERATED.contains(&file.as_str()) {
                continue;
            }
            let code = TokenStream::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
            let mut found = Vec::new();
            texts(code, &mut found);
            all.extend(found.into_iter().map(|(line, text)| Text { file: file.clone(), line, text }));
        }
    }
    all
}

#[test]
fn texts_of_the_code_name_public_items() {
    let public = Public::read();
    let texts = all_texts();
    let targets = log_targets(&texts);
    let mut checked = 0;
    let mut missing = Vec::new();
    for Text { file, line, text } in &texts {
        for path in paths(text).filter(|path| !targets.contains(path)) {
            checked += 1;
            if is_missing(path, &public) {
                missing.push(format!("{file}:{line}: {path}"));
            }
        }
    }
    assert!(missing.is_empty(), "these texts name items that are not public:\n{}", missing.join("\n"));
    assert!(checked >= 50, "only {checked} paths were found in texts");
}

#[test]
fn pages_name_public_items() {
    let public = Public::read();
    let texts = all_texts();
    let targets = log_targets(&texts);
    let mut missing = Vec::new();
    let mut files = Vec::new();
    let readmes = folders().map(|folder| folder.join("README.md"));
    readmes.chain(PAGES.map(|page| root().join(page))).for_each(|page| pages(&page, &mut files));
    for path in files {
        let file = path.strip_prefix(root()).unwrap().to_str().unwrap();
        for (number, line) in fs::read_to_string(&path).unwrap().lines().enumerate() {
            for path in paths(line).filter(|path| !targets.contains(path)) {
                let first = path.split("::").next().unwrap_or_default();
                if (first == "device_ipc" || public.has(first)) && is_missing(path, &public) {
                    missing.push(format!("{file}:{}: {path}", number + 1));
                }
            }
        }
    }
    assert!(missing.is_empty(), "these pages name items that are not public:\n{}", missing.join("\n"));
}

#[test]
fn renamed_method_in_a_text_is_missing() {
    let public = Public(
        ["Ipc: pub struct Ipc", "Ipc::open: pub fn open()", "cuda::raw::f: pub fn f()"]
            .map(|line| path(line).to_owned())
            .into(),
    );
    let found = |text: &str| {
        paths(text).filter(|path| is_missing(path, &public)).map(str::to_owned).collect::<Vec<_>>()
    };
    assert!(found("open it (Ipc::open), or call device_ipc::cuda::raw::f(); see std::mem::drop").is_empty());
    assert_eq!(found("use `Ipc::opened({x:?})` or Rpi::open: it works"), ["Ipc::opened", "Rpi::open"]);
    assert_eq!(found("device_ipc::raw::g"), ["device_ipc::raw::g"]);
}

#[test]
fn texts_are_those_that_users_read() {
    let code = "#[doc = \"A::a\"] #[error(\"B::b\")] enum E {} #[cfg(test)] mod tests { const X: &str = \"C::c\"; }\nfn f() { g(\"D::d\") }";
    let mut found = Vec::new();
    texts(TokenStream::from_str(code).unwrap(), &mut found);
    assert_eq!(found, [(1, "\"B::b\"".to_owned()), (2, "\"D::d\"".to_owned())]);
}

/// Functions of Python and PyTorch that texts of the Python package name.
const FOREIGN_IN_PYTHON: &[&str] = &[
    "cpu",
    "from_dlpack",
    "get_context",
    "int_repr",
    "len",
    "numpy",
    "offsets",
    "pool",
    "resolve_conj",
    "resolve_neg",
    "str",
    "to",
    "values",
];

/// Returns the names that a text calls: `close` in "call close() first".
fn calls(text: &str) -> impl Iterator<Item = &str> {
    let is_name = |character: char| character.is_ascii_alphanumeric() || character == '_';
    text.match_indices('(').filter_map(move |(at, _)| {
        let name = text[..at].rsplit(|character| !is_name(character)).next()?;
        name.starts_with(|first: char| first.is_ascii_lowercase()).then_some(name)
    })
}

#[test]
fn texts_of_the_python_package_name_its_functions() {
    let stubs = fs::read_to_string(root().join("python/python/device_ipc/_native.pyi")).unwrap();
    let mut files = Vec::new();
    rust_files(&root().join("python/src"), &mut files).unwrap();
    let mut missing = Vec::new();
    let mut checked = 0;
    for path in files {
        let code = TokenStream::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        let mut found = Vec::new();
        texts(code, &mut found);
        for (line, text) in found {
            for name in calls(&text) {
                checked += 1;
                if !FOREIGN_IN_PYTHON.contains(&name) && !stubs.contains(&format!("def {name}(")) {
                    missing.push(format!("{}:{line}: {name}()", path.display()));
                }
            }
        }
    }
    assert!(missing.is_empty(), "these texts name functions that are not public:\n{}", missing.join("\n"));
    assert!(checked >= 10, "only {checked} calls were found in texts");
}

#[test]
fn calls_in_a_text_are_found() {
    let found: Vec<_> = calls("call close() before str(ring) (or not), see Ipc::open(x)").collect();
    assert_eq!(found, ["close", "str", "open"]);
}

/// The contract for backends names the types that are exhaustive on purpose.
#[test]
fn types_that_the_contract_calls_exhaustive_are() {
    let contract = fs::read_to_string(root().join("ipc-core/src/backend/mod.rs")).unwrap();
    let (_, growth) = contract.split_once("# Growth of the types").unwrap();
    let (exhaustive, others) = growth.split_once("exhaustive on purpose").unwrap();
    let (others, _) = others.split_once("# Access").unwrap();
    let names = |text: &str| {
        text.split("[`").skip(1).filter_map(|rest| Some(rest.split_once('`')?.0.to_owned())).collect()
    };
    let (exhaustive, others): (Vec<_>, Vec<_>) = (names(exhaustive), names(others));
    assert!(exhaustive.len() >= 5 && others.len() >= 2, "{exhaustive:?} {others:?}");
    let list = list("device-ipc-core");
    for (names, declaration) in [(exhaustive, "pub struct"), (others, "#[non_exhaustive] pub struct")] {
        for name in names {
            let line = format!("backend::{name}: {declaration} {name} ");
            assert!(list.contains(&line), "the list has no line {line:?}");
        }
    }
}

/// An offset counts bytes or elements, and its name says which.
#[test]
fn offsets_in_the_public_api_name_their_unit() {
    // The mock's engine knows no elements.
    for (_, package, _) in CRATES.into_iter().filter(|(folder, ..)| *folder != "backend-mock/engine") {
        let list = list(package);
        let is_bare =
            |line: &&str| ["(offset: ", " offset: ", "::offset: "].iter().any(|bare| line.contains(bare));
        let bare: Vec<_> = list.lines().filter(is_bare).collect();
        assert!(bare.is_empty(), "say byte_offset or element_offset:\n{}", bare.join("\n"));
    }
}
