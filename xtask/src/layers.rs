//! `cargo xtask layers`: imports in ipc-core run down only.
//!
//! Each folder of `ipc-core/src` is a layer and uses the layers below it; within a layer neither its folders nor the files of one
//! folder import each other in a circle. The chore reads the `crate::` and `super::` paths of all code that is compiled without
//! `test` and without the feature `fuzzing`; it follows no re-exports.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, anyhow, bail};
use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};

use crate::workspace::root;

/// The layers from the ground up. The modules that stand beside them are the entry points, above all.
const LAYERS: [&str; 7] = ["model", "os", "backend", "wire", "transport", "sharing", "patterns"];

pub(crate) fn run() -> Result<()> {
    let source = root().join("ipc-core/src");
    let imports = read(&source)?;
    let faults = check(&imports);
    if !faults.is_empty() {
        bail!("ipc-core has {} imports against its layers:\n{}", faults.len(), faults.join("\n"));
    }
    eprintln!("  all {} imports of ipc-core run down", imports.len());
    Ok(())
}

/// A path that a file names.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Import {
    /// Below the source folder.
    file: String,
    line: usize,
    /// The module that names it.
    from: Vec<String>,
    /// The path, from the crate's root.
    path: Vec<String>,
    /// The siblings that it leads from and to, where these are folders of one layer, or files of one folder.
    siblings: Option<(String, String)>,
}

impl fmt::Display for Import {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ipc-core/src/{}:{}: `{}`", self.file, self.line, self.path.join("::"))
    }
}

/// Reads the imports of all files below a source folder.
fn read(source: &Path) -> Result<Vec<Import>> {
    let mut files = Vec::new();
    rust_files(source, &mut files)?;
    files.sort();
    let mut imports = Vec::new();
    for path in &files {
        let file = path.strip_prefix(source)?.to_str().context("a file's name is not UTF-8")?;
        if !is_tests(file) {
            let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            imports.extend(imports_of(file, &text, |path| source.join(path).exists())?);
        }
    }
    Ok(imports)
}

/// Collects the files of Rust below a folder.
pub(crate) fn rust_files(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            rust_files(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// Returns whether a file holds only tests or fuzzing.
pub(crate) fn is_tests(file: &str) -> bool {
    file.split('/').any(|part| {
        let part = part.strip_suffix(".rs").unwrap_or(part);
        ["tests", "properties", "fuzzing"].contains(&part)
            || part.ends_with("_tests")
            || part.ends_with("_loom")
    })
}

fn imports_of(file: &str, text: &str, exists: impl Fn(&str) -> bool) -> Result<Vec<Import>> {
    let tokens = TokenStream::from_str(text).map_err(|error| anyhow!("cannot read {file}: {error}"))?;
    let mut module: Vec<String> = file.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    if module.last().is_some_and(|last| ["mod", "lib"].contains(&last.as_str())) {
        module.pop();
    }
    let mut paths = Vec::new();
    walk(tokens, &module, &mut paths);
    let siblings = |path: &[String]| {
        let common = module.iter().zip(path).take_while(|(one, other)| one == other).count();
        let (one, other) = (module.get(..=common)?.join("/"), path.get(..=common)?.join("/"));
        let are = |end: &str| [&one, &other].iter().all(|it| exists(&format!("{it}{end}")));
        let is_file = common > 0 && module.len() == common + 1;
        (common == 1 && are("") || is_file && are(".rs")).then_some((one, other))
    };
    let import = |(line, path): (usize, Vec<String>)| Import {
        file: file.to_owned(),
        line,
        from: module.clone(),
        siblings: siblings(&path),
        path,
    };
    Ok(paths.into_iter().map(import).collect())
}

/// Collects the paths that begin with `crate` or `super`, with the line of each.
fn walk(tokens: TokenStream, module: &[String], paths: &mut Vec<(usize, Vec<String>)>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut at = 0;
    while at < tokens.len() {
        if let Some(behind) = skipped(&tokens, at) {
            at = behind;
            continue;
        }
        match (&tokens[at], tokens.get(at + 1), tokens.get(at + 2)) {
            (TokenTree::Ident(word), Some(TokenTree::Ident(name)), Some(TokenTree::Group(body)))
                if word == "mod" =>
            {
                let inner: Vec<_> = module.iter().cloned().chain([name.to_string()]).collect();
                walk(body.stream(), &inner, paths);
                at += 3;
            }
            // A macro's `$crate` names what its callers see.
            (TokenTree::Punct(dollar), Some(TokenTree::Ident(word)), _)
                if dollar.as_char() == '$' && word == "crate" =>
            {
                at += 2;
            }
            (TokenTree::Ident(word), ..) if word == "crate" && separated(&tokens, at + 1) => {
                at = path(&tokens, at + 3, Vec::new(), paths);
            }
            (TokenTree::Ident(word), ..) if word == "super" && separated(&tokens, at + 1) => {
                let mut base = module.to_vec();
                base.pop();
                at += 3;
                while matches!(tokens.get(at), Some(TokenTree::Ident(word)) if word == "super")
                    && separated(&tokens, at + 1)
                {
                    base.pop();
                    at += 3;
                }
                at = path(&tokens, at, base, paths);
            }
            (TokenTree::Group(group), ..) => {
                walk(group.stream(), module, paths);
                at += 1;
            }
            _ => at += 1,
        }
    }
}

/// Returns the place behind an item that only tests or fuzzing compile.
pub(crate) fn skipped(tokens: &[TokenTree], at: usize) -> Option<usize> {
    let is_hash = matches!(&tokens[at], TokenTree::Punct(hash) if hash.as_char() == '#');
    let (true, Some(TokenTree::Group(attribute))) = (is_hash, tokens.get(at + 1)) else { return None };
    let text = attribute.stream().to_string().replace(' ', "");
    let for_tests = text.starts_with("cfg(")
        && !text.contains("not(")
        && (text.contains("(test") || text.contains(",test") || text.contains("\"fuzzing\""));
    if !for_tests {
        return None;
    }
    let ends = |token: &TokenTree| match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        TokenTree::Punct(punct) => punct.as_char() == ';',
        _ => false,
    };
    // `use a::{b};` ends behind its group.
    let end = (at + 2..tokens.len()).find(|index| ends(&tokens[*index])).unwrap_or(tokens.len() - 1);
    Some(end + 1)
}

fn separated(tokens: &[TokenTree], at: usize) -> bool {
    let colon =
        |index: usize| matches!(tokens.get(index), Some(TokenTree::Punct(colon)) if colon.as_char() == ':');
    colon(at) && colon(at + 1)
}

/// Reads what stands behind a `::`; returns the place behind it.
fn path(
    tokens: &[TokenTree],
    mut at: usize,
    mut so_far: Vec<String>,
    paths: &mut Vec<(usize, Vec<String>)>,
) -> usize {
    loop {
        match tokens.get(at) {
            Some(TokenTree::Ident(name)) => {
                so_far.push(name.to_string());
                if !separated(tokens, at + 1) {
                    paths.push((name.span().start().line, so_far));
                    return at + 1;
                }
                at += 3;
            }
            Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                several(group, &so_far, paths);
                return at + 1;
            }
            Some(token) => {
                // `*`, or the generic arguments of a type.
                paths.push((token.span().start().line, so_far));
                return at;
            }
            None => return at,
        }
    }
}

/// Reads the alternatives of a `use` with braces.
fn several(group: &Group, so_far: &[String], paths: &mut Vec<(usize, Vec<String>)>) {
    let tokens: Vec<TokenTree> = group.stream().into_iter().collect();
    for one in tokens.split(|token| matches!(token, TokenTree::Punct(comma) if comma.as_char() == ',')) {
        if !one.is_empty() {
            path(one, 0, so_far.to_vec(), paths);
        }
    }
}

/// Returns the height of a module's layer; that of the entry points is above all.
fn height(path: &[String]) -> usize {
    let layer = path.first().and_then(|first| LAYERS.iter().position(|layer| layer == first));
    layer.unwrap_or(LAYERS.len())
}

/// Returns the faults, as lines.
fn check(imports: &[Import]) -> Vec<String> {
    let up = imports.iter().filter(|import| height(&import.path) > height(&import.from));
    let faults = up.map(|import| {
        let (from, to) = (&import.from[0], &import.path[0]);
        format!("{import} runs up: `{from}` may not use `{to}`, which is above it")
    });
    faults.chain(circles(imports)).collect()
}

/// Returns a fault for each import of a circle of siblings.
fn circles(imports: &[Import]) -> Vec<String> {
    let mut left: Vec<_> = imports.iter().filter_map(|one| Some((one, one.siblings.as_ref()?))).collect();
    let mut before = usize::MAX;
    while left.len() < before {
        before = left.len();
        let (from, to): (BTreeSet<_>, BTreeSet<_>) = left.iter().map(|(_, (from, to))| (from, to)).unzip();
        left.retain(|(_, (one, other))| to.contains(one) && from.contains(other));
    }
    left.iter().map(|(import, pair)| format!("{import} closes a circle of {pair:?}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(file: &str, text: &str) -> Vec<(usize, String)> {
        let imports = imports_of(file, text, |_| true).unwrap();
        imports.into_iter().map(|import| (import.line, import.path.join("::"))).collect()
    }

    #[test]
    fn core_keeps_its_layers() {
        run().unwrap();
    }

    #[test]
    fn paths_are_read_with_their_lines() {
        let text = "// crate::a\nuse crate::b::{C, d::{E, F as G}, self};\nfn f(x: crate::h::I<u8>) { \"crate::j\"; crate::k!() }";
        let expected = [(2, "b::C"), (2, "b::d::E"), (2, "b::d::F"), (2, "b::self"), (3, "h::I"), (3, "k")];
        assert_eq!(paths("wire/x.rs", text), expected.map(|(line, path)| (line, path.to_owned())));
    }

    #[test]
    fn super_is_resolved() {
        let text = "use super::super::up::A; mod inner { use super::B; }";
        let expected = [(1, "up::A"), (1, "wire::x::B")];
        assert_eq!(paths("wire/x.rs", text), expected.map(|(line, path)| (line, path.to_owned())));
        assert_eq!(paths("wire/x/mod.rs", "use super::C;"), [(1, "wire::C".to_owned())]);
    }

    #[test]
    fn test_code_is_skipped() {
        let text = "#[cfg(test)]\nmod tests { use crate::a::B; }\n#[cfg(any(test, feature = \"fuzzing\"))]\npub(crate) use crate::c::D;\n#[cfg(not(test))]\nuse crate::e::F;";
        assert_eq!(paths("wire/x.rs", text), [(6, "e::F".to_owned())]);
        assert!(is_tests("sharing/fuzzing/pages.rs") && is_tests("wire/properties.rs"));
        assert!(is_tests("import/cache_loom.rs") && !is_tests("wire/protocol.rs"));
    }

    #[test]
    fn import_of_a_layer_above_is_a_fault() {
        let imports =
            imports_of("wire/x.rs", "use crate::sharing::A;\nuse crate::model::B;", |_| true).unwrap();
        let faults = check(&imports);
        assert_eq!(faults.len(), 1);
        assert!(faults[0].starts_with("ipc-core/src/wire/x.rs:1: `sharing::A` runs up"), "{faults:?}");
    }

    #[test]
    fn imports_in_a_circle_are_a_fault() {
        let of = |file, path: &str| imports_of(file, &format!("use crate::{path};"), |_| true).unwrap();
        for (one, other) in [
            (of("wire/a/x.rs", "wire::b::A"), of("wire/b.rs", "wire::a::B")),
            (of("wire/c/a.rs", "wire::c::b::A"), of("wire/c/b.rs", "wire::c::a::B")),
        ] {
            assert!(check(&one).is_empty());
            assert_eq!(check(&[one, other].concat()).len(), 2);
        }
    }
}
